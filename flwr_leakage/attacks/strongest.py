"""Several attacks in order of strength; each target keeps what its own objective likes best."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flwr_leakage.attacks.base import Attack, ProgressCallback, failure
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import pose
from flwr_leakage.records import Batch, Observation, Reconstruction


@dataclass(frozen=True)
class Strongest:
    """Try attacks one after another on the targets that are not solved yet.

    All candidates are judged alike, by the relative squared distance of their gradients from
    the observed one, whatever objective the attack itself used. A result's stats name the winner
    as ``attack``, by its key, and hold that attack's own objective as ``own_objective``.

    Attributes:
        attacks: by name, in the order in which they are tried; one that does not fit a target
            fails fast.
        tolerance: a target is solved once its distance is at most this.
    """

    attacks: Mapping[str, Attack]
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if not isinstance(self.attacks, Mapping) or not self.attacks:
            raise ValueError(
                f"attacks must be a mapping by name with at least one attack, got {self.attacks}."
            )

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        best: list[Reconstruction] = [failure("not attacked")] * len(job.observations)
        seconds = [0.0] * len(best)
        for name, attack in self.attacks.items():
            open_targets = [i for i, r in enumerate(best) if not r.objective <= self.tolerance]
            if not open_targets:
                break
            found = attack(job.take(open_targets), progress)
            for index, result in zip(open_targets, found, strict=True):
                seconds[index] += result.stats.get("cpu_seconds", 0.0)
                if result.batch is None:
                    if best[index].batch is None:
                        best[index] = result
                    continue
                value = _distance(job, job.observations[index], result.batch)
                if not value >= best[index].objective:
                    stats = {**result.stats, "attack": name, "own_objective": result.objective}
                    best[index] = Reconstruction(result.batch, value, stats)
        return [
            Reconstruction(r.batch, r.objective, {**r.stats, "cpu_seconds": spent}, r.error)
            for r, spent in zip(best, seconds, strict=True)
        ]


def _distance(job: AttackJob, observation: Observation, batch: Batch) -> float:
    """The relative squared distance of a batch's gradient, in float64; infinite if not finite."""
    problem = pose(job.gradient_map, job.spec, observation, job.threat).to(torch.float64)
    soft = batch.targets.is_floating_point()
    targets = batch.targets.double() if soft else batch.targets
    value = gradient_distance(problem, Batch(batch.inputs.double(), targets))
    return value if math.isfinite(value) else math.inf
