"""Test on the client whether the server would find the client's records in its update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flwr_leakage.members.verdict import Membership, examine_observation
from flwr_leakage.params import on_cpu
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.records import Batch, InputSpec, Measurement, Observation, State, Update

LEVEL = 0.01
"""The largest p-value at which the measurement ``membership_share`` counts a sample as found."""


@dataclass(frozen=True)
class OwnRecords:
    """A score: whether a server would find the samples of a round in the client's update.

    The client runs the server's own test, :func:`~flwr_leakage.membership`, on all samples of its
    round. It assumes that the server has the records with their labels, the schedule, and null
    records (which cannot be members) of the distribution of ``null``. A better test, or several
    rounds, may find more.

    Two limits suit a :class:`~flwr_leakage.audit.gate.Gate`, which withholds updates.
    ``scores={"membership_corrected": 0.01}`` withholds updates in which a single sample is found.
    ``scores={"membership_share": 0.1}`` withholds updates in which a tenth of the samples is found
    at 1 % of false alarms, while chance finds 1 %.

    Attributes:
        null: records with labels, from the distribution of the samples, on which the client never
            trains, such as those for evaluation. At least 20 are needed; 400 allow small p-values.
    """

    null: Batch

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return the measurements of the test on the update after the defense, and on that before
        it.

        ``membership_corrected`` is the p-value of each sample, corrected by Holm's method for all
        samples of the round. If a sample's statistic lies below those of all null records (known
        not to be members), and they are too few to estimate a smaller p-value, the p-value is an
        upper bound, and its error bar reaches to 0. ``membership_share`` is the share of the
        round's samples that are found at 1 % of false alarms; each sample has this same value. The
        names with ``_before`` belong to the update before the defense. The notes state the server's
        finding on each sample. ``client`` holds both updates; ``seed`` is that of random draws, if
        the round is repeated on null records.

        Raises:
            ValueError: the test cannot be made; see :func:`~flwr_leakage.membership`.
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
        if not records.inputs.is_floating_point():
            raise ValueError("OwnRecords tests images; use flwr_leakage.membership for token ids")
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
