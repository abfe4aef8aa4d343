"""Several attacks in order of strength; each target keeps what its own objective likes best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.base import Attack, ProgressCallback, failure
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel


@dataclass(frozen=True)
class Strongest:
    """Try attacks one after another on the targets that are not solved yet.

    All candidates are judged alike, by the relative squared distance of their gradients from
    the observed one, whatever objective the attack itself used.

    Attributes:
        attacks: in the order in which they are tried; one that does not fit a target fails fast.
        tolerance: a target is solved once its distance is at most this.
    """

    attacks: Sequence[Attack]
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if not self.attacks:
            raise ValueError("attacks must hold at least one attack, got none.")

    def __call__(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        observations: Sequence[Observation],
        threat: ThreatModel,
        generator: torch.Generator,
        progress: ProgressCallback | None = None,
    ) -> list[Reconstruction]:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        best: list[Reconstruction] = [failure("not attacked")] * len(observations)
        seconds = [0.0] * len(observations)
        seed = int(torch.randint(2**31, (), generator=generator))
        for attack in self.attacks:
            open_targets = [i for i, r in enumerate(best) if not r.objective <= self.tolerance]
            if not open_targets:
                break
            chosen = [observations[i] for i in open_targets]
            stream = torch.Generator().manual_seed(seed)
            found = attack(gradient_map, spec, chosen, threat, stream, progress)
            for index, result in zip(open_targets, found, strict=True):
                seconds[index] += result.stats.get("cpu_seconds", 0.0)
                if result.batch is None:
                    if best[index].batch is None:
                        best[index] = result
                    continue
                value = _distance(gradient_map, spec, observations[index], threat, result.batch)
                if not value >= best[index].objective:
                    name = type(attack).__name__
                    stats = {**result.stats, "attack": name, "own_objective": result.objective}
                    best[index] = Reconstruction(result.batch, value, stats)
        return [
            Reconstruction(r.batch, r.objective, {**r.stats, "cpu_seconds": spent}, r.error)
            for r, spent in zip(best, seconds, strict=True)
        ]


def _distance(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    threat: ThreatModel,
    batch: Batch,
) -> float:
    problem = pose(gradient_map, spec, observation, threat).to(torch.float64)
    targets: Tensor = batch.targets
    if targets.is_floating_point():
        targets = targets.double()
    value = gradient_distance(problem, Batch(batch.inputs.double(), targets))
    return value if math.isfinite(value) else math.inf
