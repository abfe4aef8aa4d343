"""Would the server find my records in this? A client's own test of what it is about to send."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flwr_leakage.members.observed import examine_observation
from flwr_leakage.members.verdict import Membership
from flwr_leakage.params import on_cpu
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.records import Batch, InputSpec, Measurement, Observation, State, Update

LEVEL = 0.01
"""Chance of a false alarm at which ``membership_share`` counts a sample as found."""


@dataclass(frozen=True)
class OwnRecords:
    """A score: whether a server would find the samples of a round in the client's update.

    The client makes the server's own test, :func:`~flwr_leakage.membership`, of all samples of its
    round. The server is taken to have the records with their labels, the schedule, and null records
    like the client's. What the test does not find may be found by a better one, or over several
    rounds.

    Two limits suit a :class:`~flwr_leakage.audit.gate.Gate`:
    ``scores={"membership_corrected": 0.01}`` lets nothing pass in which a single sample is found,
    and ``scores={"membership_share": 0.1}`` nothing in which a tenth of the samples is found at 1 %
    of false alarms, which by chance are 1 %.

    Attributes:
        null: records like the samples, with labels, that the client never trains on, such as those
            it evaluates on. At least 20; from 400 on the test tells small p-values.
    """

    null: Batch

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Test the update after the defense, and before it.

        Args:
            client: the samples, and the round's raw and released update.
            seed: of a rehearsal's draws.

        Returns:
            ``membership_corrected``, the p-value of each sample, corrected by Holm's method for
            all samples of the round. Where a sample lies below all null records, and these are too
            few to tell more, the value is an upper bound, and its error bar reaches to 0.
            ``membership_share``, the share of the round's samples that are found at 1 % of false
            alarms, at every sample. Both once more with ``_before``, of the raw update. The notes
            say what the server would read of each sample.

        Raises:
            ValueError: see :func:`~flwr_leakage.membership`.
        """
        exposure = client.exposure
        after = self._examine(client, exposure.released, seed)
        before = after
        if exposure.raw is not exposure.released:
            before = self._examine(client, exposure.raw, seed)
        return [
            *_measured("", after, exposure.indices),
            *_measured("_before", before, exposure.indices),
        ]

    def _examine(self, client: ClientSamples, update: Update, seed: int) -> Membership:
        exposure, gradient_map = client.exposure, client.gradient_map
        records = exposure.whole.private
        with torch.no_grad():
            logits = gradient_map.logits(exposure.params, records.inputs[:1], exposure.buffers)
        channels, height, width = records.inputs.shape[1:]
        spec = InputSpec((channels, height, width), logits.shape[1])
        there = replace(update, delta=on_cpu(update.delta), buffers=on_cpu(update.buffers))
        seen = Observation(1, 0, on_cpu(exposure.params), on_cpu(exposure.buffers), there)
        return examine_observation(
            gradient_map, spec, seen, records, self.null, seed=seed,
            null_origin="the client's other records",
        )  # fmt: skip


def _measured(suffix: str, made: Membership, indices: Sequence[int]) -> list[Measurement]:
    is_least = made.is_unresolved
    share = float(((made.p_values <= LEVEL) | is_least).double().mean())
    corrected = made.corrected.tolist()
    notes = tuple(f"{made.evidence} evidence: it {made.says(index)}" for index in indices)
    states: list[State] = ["upper bound" if is_least[index] else "exact" for index in indices]
    return [
        Measurement(
            f"membership_corrected{suffix}", tuple(corrected[index] for index in indices), "1",
            "larger is safer", notes,
            errors=tuple(corrected[index] * float(is_least[index]) for index in indices),
            states=tuple(states),
        ),
        Measurement(
            f"membership_share{suffix}", (share,) * len(indices), "1", "larger leaks more",
        ),
    ]  # fmt: skip
