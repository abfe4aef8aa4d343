"""Whom the server attacks, and what a simulation knows of the truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from flwr_leakage.params import add, scale
from flwr_leakage.records import Batch, Observation, Update


@dataclass(frozen=True)
class Truth:
    """What a client really trained on; only a simulation can know it.

    Attributes:
        private: the private samples, against which reconstructions are measured.
        defended: the samples as encoded by the defense, whose labels and BatchNorm statistics
            are those that a threat model may grant.
    """

    private: Batch
    defended: Batch


TruthSource = Callable[[int, int, int], Truth]
"""(server_round, client_id, num_examples) ↦ the truth."""


@dataclass(frozen=True)
class Selection:
    """Whom to attack and when.

    Attributes:
        every: rounds from one attack to the next, ≥ 1.
        first: the first round to attack, ≥ 1.
        clients: the partition ids to attack, or ``None`` for all.
        max_clients: at most so many in a round, the lowest ids first; ``None`` for no limit.
    """

    every: int = 1
    first: int = 1
    clients: tuple[int, ...] | None = None
    max_clients: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "first", "max_clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(self.clients))

    def __call__(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations to attack."""
        chosen = [
            observation
            for observation in observations
            if observation.server_round >= self.first
            and (observation.server_round - self.first) % self.every == 0
            and (self.clients is None or observation.client_id in self.clients)
        ]
        return sorted(chosen, key=lambda observation: observation.client_id)[: self.max_clients]


@dataclass(frozen=True)
class Target:
    """One thing to attack: a client's update, or the aggregate of several.

    Attributes:
        observation: what the attack is given.
        members: (client id, number of samples) of each client in it.
    """

    observation: Observation
    members: tuple[tuple[int, int], ...]

    @staticmethod
    def of(observation: Observation) -> "Target":
        """The update of a single client."""
        return Target(observation, ((observation.client_id, observation.update.num_examples),))

    def join(self, truths: Sequence[Truth]) -> Truth:
        """The members' samples that left a trace in the update, in the members' order."""
        schedule = self.observation.update.schedule
        used = [schedule.num_samples_used(len(truth.private)) for truth in truths]
        return Truth(
            Batch.concatenate([t.private[:n] for t, n in zip(truths, used, strict=True)]),
            Batch.concatenate([t.defended[:n] for t, n in zip(truths, used, strict=True)]),
        )


def aggregate(observations: Sequence[Observation], batch_statistics: bool = False) -> Target:
    """What secure aggregation reveals: the mean update, weighted by the numbers of samples.

    Where every client takes one step on all of its samples, the weighted mean is the update of
    one client that holds all of the samples. Otherwise it is explained by a replay of every
    client, whose numbers of samples the server knows as they weight the mean.

    Args:
        observations: the clients' updates of one round.
        batch_statistics: each client normalised with the statistics of its own batch, so that
            even one step is no step of the union.
    """
    first = observations[0]
    schedule = first.update.schedule
    counts = tuple(observation.update.num_examples for observation in observations)
    total = sum(counts)
    is_union = schedule.num_steps == 1 and max(counts) <= schedule.batch_size
    if is_union and not batch_statistics:
        schedule = replace(schedule, batch_size=total)
    delta = {name: torch.zeros_like(value) for name, value in first.update.delta.items()}
    for observation, count in zip(observations, counts, strict=True):
        delta = add(delta, scale(observation.update.delta, count / total))
    return Target(
        Observation(
            server_round=first.server_round,
            client_id=-1,
            params=first.params,
            buffers=first.buffers,
            update=Update(delta, {}, schedule, total),
            members=() if is_union and not batch_statistics else counts,
        ),
        tuple((o.client_id, count) for o, count in zip(observations, counts, strict=True)),
    )


@dataclass
class History:
    """The latest rounds of each target, for attacks on several rounds at once.

    Attributes:
        rounds: kept of each target, the present one included.
    """

    rounds: int = 1
    seen: dict[tuple[tuple[int, int], ...], list[Observation]] = field(default_factory=dict)

    def fuse(self, target: Target) -> Target:
        """Keep the target, and join the kept rounds of the same members with it.

        Raises:
            ValueError: a step leaves samples out, so that a round's order would count; it is
                another one in every round.
        """
        if self.rounds == 1:
            return target
        schedule = target.observation.update.schedule
        largest = max(count for _, count in target.members)
        if largest > schedule.batch_size:
            raise ValueError(
                "rounds can be attacked jointly where every step takes all of a client's samples, "
                f"got steps of {schedule.batch_size} and clients of up to {largest} samples."
            )
        kept = self.seen.setdefault(target.members, [])
        joint = replace(target.observation, earlier=tuple(kept))
        self.seen[target.members] = [*kept, target.observation][-(self.rounds - 1) :]
        return replace(target, observation=joint)
