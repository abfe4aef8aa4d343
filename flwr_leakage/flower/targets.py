"""Whom the server attacks, and what a simulation knows of the truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        used = self.observation.update.schedule.num_samples_used(
            self.observation.update.num_examples
        )
        return Truth(
            Batch.concatenate([truth.private for truth in truths])[:used],
            Batch.concatenate([truth.defended for truth in truths])[:used],
        )


def aggregate(observations: Sequence[Observation]) -> Target:
    """What secure aggregation reveals: the mean update, weighted by the numbers of samples.

    Where every client takes one step on all of its samples, the weighted mean is the update of
    one client that holds all of the samples. With more steps it is no client's update.

    Raises:
        ValueError: a client takes more than one step, or leaves samples out of it.
    """
    first = observations[0]
    schedule = first.update.schedule
    counts = [observation.update.num_examples for observation in observations]
    if schedule.num_steps != 1 or max(counts) > schedule.batch_size:
        raise ValueError(
            "the aggregate of clients equals one client's update for one local step on all of a "
            f"client's samples, got {schedule.num_steps} steps of {schedule.batch_size} samples "
            f"and clients of up to {max(counts)} samples."
        )
    total = sum(counts)
    delta = {name: torch.zeros_like(value) for name, value in first.update.delta.items()}
    for observation, count in zip(observations, counts, strict=True):
        delta = add(delta, scale(observation.update.delta, count / total))
    return Target(
        Observation(
            server_round=first.server_round,
            client_id=-1,
            params=first.params,
            buffers=first.buffers,
            update=Update(delta, {}, replace(schedule, batch_size=total), total),
        ),
        tuple((o.client_id, count) for o, count in zip(observations, counts, strict=True)),
    )
