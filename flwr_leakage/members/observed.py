"""Test records for membership in what a server observed of an update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members.verdict import (
    STATISTICS,
    Correction,
    Membership,
    Statistic,
    examine,
)
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel

Records = Tensor | Batch
"""Inputs (N, C, H, W) as the model takes them, with labels where these are known."""


def examine_observation(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    records: Records,
    null: Records,
    *,
    null_origin: str = "given",
    statistics: Sequence[Statistic] = STATISTICS,
    correction: Correction = "holm",
    noise_std: float | None = None,
    seed: int = 0,
) -> Membership:
    """Test records for membership in what a server observed; see :func:`membership`."""
    threat = ThreatModel(view="aggregate" if observation.members else "single")
    # a model may draw from the global generator, whose state is kept
    with torch.random.fork_rng(devices=[]):
        problem = pose(gradient_map, spec, observation, threat)
        labelled = isinstance(records, Batch) and isinstance(null, Batch)
        generator = torch.Generator().manual_seed(seed)
        return examine(
            problem,
            _as_batch(records, spec.num_classes, generator),
            _as_batch(null, spec.num_classes, generator),
            labelled=labelled,
            null_origin=null_origin,
            statistics=statistics,
            correction=correction,
            noise_std=noise_std,
            seed=seed,
            mixed=observation.update.mixed,
        )


def _as_batch(records: Records, num_classes: int, generator: torch.Generator) -> Batch:
    """Return records on the CPU with labels; unknown ones are drawn, for a rehearsal only.

    They are contiguous, as many a model's ``view`` takes no images whose channels come last.
    """
    if isinstance(records, Batch):
        records = records.to(torch.device("cpu"))
        return Batch(records.inputs.contiguous(), records.targets)
    labels = torch.randint(num_classes, (len(records),), generator=generator)
    return Batch(records.cpu().contiguous(), labels)
