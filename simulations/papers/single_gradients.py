"""Clients that release one plain gradient, their inversion, and how close it came."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flwr_leakage.attacks import (
    Adam,
    AttackJob,
    Cosine,
    Euclidean,
    GradientInversion,
    Normal,
    TotalVariation,
)
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics, Prior
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from simulations.papers.findings import Row


@dataclass(frozen=True)
class Inversion:
    """An attack on single gradients: gradient matching with total variation by Adam.

    Attributes:
        loss: ``L2``, ‖g − g*‖² as the papers have it, or ``cosine``.
        iterations: of Adam.
        learning_rate: of Adam, in units of the normalised input; × 0.1 at 3/8, 5/8 and 7/8.
        tv_weight: of total variation.
        statistics_weight: of the BatchNorm prior, which takes statistics of the private batch.
        restarts: starts of each target, from normal noise.
    """

    loss: Literal["L2", "cosine"]
    iterations: int
    learning_rate: float = 0.1
    tv_weight: float = 0.0
    statistics_weight: float = 0.0
    restarts: int = 1

    def __call__(
        self,
        gradient_map: GradientMap,
        batches: Sequence[Batch],
        spec: InputSpec,
        seed: int,
    ) -> list[list[Reconstruction]]:
        """All restarts of every batch, labels given."""
        threat = ThreatModel(
            labels="known", batch_norm="exact" if self.statistics_weight else "none"
        )
        observations = observe(gradient_map, batches)
        repeated = [each for each in observations for _ in range(self.restarts)]
        numbers = [n for _ in observations for n in range(self.restarts)]
        found = self._attack()(AttackJob(gradient_map, spec, repeated, threat, seed, numbers))
        starts = range(0, len(found), self.restarts)
        return [found[begin : begin + self.restarts] for begin in starts]

    def _attack(self) -> GradientInversion:
        priors: dict[str, Prior] = {
            "total_variation": TotalVariation(self.tv_weight),
            "batch_norm_statistics": BatchNormStatistics(self.statistics_weight),
        }
        weights = {
            "total_variation": self.tv_weight,
            "batch_norm_statistics": self.statistics_weight,
        }
        return GradientInversion(
            objective=Cosine() if self.loss == "cosine" else Euclidean(relative=False),
            priors={name: prior for name, prior in priors.items() if weights[name]},
            initialisation=Normal(1.0),
            optimizer=Adam(self.iterations, self.learning_rate, decay="step"),
        )


def observe(gradient_map: GradientMap, batches: Sequence[Batch]) -> list[Observation]:
    """What a server sees of clients that each send the gradient of one batch, and is told."""
    params, buffers = gradient_map.params, gradient_map.buffers
    seen = []
    for index, batch in enumerate(batches):
        gradient = gradient_map(params, batch, buffers)
        delta = {name: -value.detach() for name, value in gradient.items()}
        statistics = gradient_map.statistics(params, batch.inputs, buffers)
        schedule = LocalSchedule(1.0, batch_size=len(batch))
        update = Update(delta, {}, schedule, len(batch))
        told = Disclosure(batch.targets, statistics)
        seen.append(Observation(1, index, params, buffers, update, told))
    return seen


def outcomes(
    found: Reconstruction, truth: Batch, spec: InputSpec, lpips: Lpips | None
) -> list[Row]:
    """MSE in pixels and in units of the normalised input, SSIM, PSNR, LPIPS of every sample.

    Raises:
        RuntimeError: the attack failed.
    """
    if found.batch is None:
        raise RuntimeError(f"an attack failed: {found.error}")
    truth = Batch(truth.inputs.cpu(), truth.targets.cpu())
    evaluation = Evaluator(lpips=lpips).evaluate(found, truth, spec)
    columns = {m.name.split("_")[0]: m.values for m in evaluation.measurements}
    normalised = _squared_errors(spec.normalize(evaluation.matched.float()), truth.inputs)
    return [
        {
            **{
                name: columns[name][i]
                for name in ("mse", "ssim", "psnr", "lpips")
                if name in columns
            },
            "mse_normalised": normalised[i],
        }
        for i in range(len(truth))
    ]


def _squared_errors(left: Tensor, right: Tensor) -> list[float]:
    return (left - right).square().flatten(1).mean(1).tolist()
