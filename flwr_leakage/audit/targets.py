"""Find the targets of attacks: the updates of clients, or their mean, of one or more rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from flwr_leakage.audit.truth import Truth
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import add, scale
from flwr_leakage.records import Batch, Observation, ThreatModel, Update


@dataclass(frozen=True)
class Target:
    """A target of an attack: a client's update, or the mean of several clients' updates.

    Attributes:
        observation: the input of the attack.
        members: pairs of client id and number of samples, one for each client in the target.
    """

    observation: Observation
    members: tuple[tuple[int, int], ...]

    @staticmethod
    def of(observation: Observation) -> "Target":
        """Return a target that is the update of a single client, given its observation."""
        return Target(observation, ((observation.client_id, observation.update.num_examples),))

    def join(self, truths: Sequence[Truth]) -> Truth:
        """Return the samples that the steps of the update used, joined in the order of the clients.

        ``truths`` are the samples of each client in the target.
        """
        if len(truths) == 1 and truths[0].mixing is not None:
            return truths[0]  # a simulation's truth holds the samples after mixing
        schedule = self.observation.update.schedule
        used = [schedule.num_samples_used(len(truth.private)) for truth in truths]
        return Truth(
            Batch.concatenate([t.private[:n] for t, n in zip(truths, used, strict=True)]),
            Batch.concatenate([t.defended[:n] for t, n in zip(truths, used, strict=True)]),
        )


def aggregate(observations: Sequence[Observation], batch_statistics: bool = False) -> Target:
    """Return the mean of clients' updates, weighted by numbers of samples, as one target.

    The mean is all that a server sees under secure aggregation. If every client takes one step on
    all of its samples, the weighted mean is the update of one client that holds all of the samples.
    Otherwise an attack replays every client. The server knows their numbers of samples, as these
    weight the mean. If ``batch_statistics`` is true, BatchNorm normalises by each client's own
    batch, so that even with one step an attack replays every client.

    Raises:
        ValueError: the clients train by different schedules.
    """
    first = observations[0]
    schedule = first.update.schedule
    if any(observation.update.schedule != schedule for observation in observations):
        raise ValueError(
            "an aggregate is attacked where every client takes the same number of steps, got "
            "clients of different sizes that train by epochs: set client.num_steps."
        )
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
            update=Update(
                delta, {}, schedule, total, any(each.update.mixed for each in observations)
            ),
            members=() if is_union and not batch_statistics else counts,
        ),
        tuple((o.client_id, count) for o, count in zip(observations, counts, strict=True)),
    )


MAX_HISTORY = 1000
"""The largest number of targets whose earlier rounds are kept in memory, as clients choose their
own ids and may use any number. The value is a choice. Beyond it, the target that was not seen for
the longest time is forgotten.
"""


@dataclass
class History:
    """The latest rounds of each target, for attacks on several rounds at once.

    Attributes:
        rounds: the number of rounds that are attacked together, the present one included.
        seen: by a target's client ids, the clients' numbers of samples, and the observations of
            earlier rounds with these numbers.
    """

    rounds: int = 1
    seen: dict[tuple[int, ...], tuple[tuple[int, ...], list[Observation]]] = field(
        default_factory=dict
    )

    def fuse(self, target: Target) -> Target:
        """Return a target joined with earlier rounds of the same clients, and remember the target's
        round.

        Raises:
            ValueError: a step does not take all of a client's samples. The update would then depend
                on the order of the samples, which differs between rounds.
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
        clients, counts = (tuple(part) for part in zip(*target.members, strict=True))
        before, kept = self.seen.pop(clients, (counts, []))
        # If the numbers of samples changed, so did the samples. The earlier rounds are then left
        # out, as no attack can join rounds of different samples.
        if before != counts:
            kept = []
        joint = replace(target.observation, earlier=tuple(kept))
        self.seen[clients] = counts, [*kept, target.observation][-(self.rounds - 1) :]
        while len(self.seen) > MAX_HISTORY:
            # The target that was not seen for the longest time is forgotten.
            del self.seen[next(iter(self.seen))]
        return replace(target, observation=joint)


def find_targets(
    chosen: Sequence[Observation], threat: ThreatModel, gradient_map: GradientMap, history: History
) -> list[Target]:
    """Return a round's targets: each chosen update, or their mean, joined with earlier rounds.

    Args:
        chosen: the updates to attack, of one round.
        threat: the attacker's view: single updates, or their mean.
        gradient_map: the model and its loss, whose BatchNorm mode decides whether the mean is the
            update of a single client.
        history: the earlier rounds of each target; this round is added.

    Raises:
        ValueError: the clients in a mean train by different schedules; or several rounds are to be
            attacked at once and a step does not take all samples of a client.
    """
    if threat.view == "aggregate" and chosen:
        targets = [aggregate(chosen, gradient_map.uses_batch_statistics)]
    else:
        targets = [Target.of(observation) for observation in chosen]
    return [history.fuse(target) for target in targets]
