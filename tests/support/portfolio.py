"""Attacks and candidates to try a portfolio with."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flwr_leakage.defenses import GaussianNoise
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, Reconstruction


@dataclass(frozen=True)
class Answering:
    """An attack that answers what it was made with, and notes the limits that it was given."""

    batch: Batch | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    raises: str = ""
    limits: list[float | None] = field(default_factory=list)

    def __call__(self, job, progress=None):
        self.limits.append(job.max_seconds)
        if self.raises:
            raise KeyError(self.raises)
        objective = 1.0 if self.batch else math.nan
        return [Reconstruction(self.batch, objective, self.stats, self.error)] * len(
            job.observations
        )


def erring(batch, seed, size=0.02):
    errors = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(seed))
    return Batch(batch.inputs + size * errors, batch.targets)


def error(result, truth):
    return float((result.batch.inputs - truth.inputs).square().mean())


def noised(job, size=0.1):
    update = GaussianNoise(size).on_update(job.observations[0].update, Reproducible.from_seed(0))
    return replace(job, observations=[replace(job.observations[0], update=update)])
