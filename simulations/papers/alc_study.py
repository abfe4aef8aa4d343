"""What the angular Lipschitz study is made of: checkpoints, BatchNorm modes, batches, attacks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.params import Params, ravel
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.scores.lipschitz import lipschitz_constants
from simulations.papers.findings import Row
from simulations.papers.lab import Lab
from simulations.papers.parts import blocks
from simulations.papers.single_gradients import Inversion, outcomes
from simulations.papers.training import Recipe

MODES: tuple[tuple[str, BatchNormMode], ...] = (("eval", "running"), ("train", "batch"))
ATTACKER = (
    "the gradient of one batch, the model, the labels; of a client in train mode also the "
    "BatchNorm statistics of the private batch, as a prior"
)
SAID = (
    "CIFAR-10 stands in for CIFAR-100 at sizes smoke and cpu, and narrow ResNet-8 for ResNet-18.",
    "A client in eval mode has no statistics of its batch, so that the prior is left out there.",
    "L̃ and L̃cos are of the whole batch, maxima over draws, in float64; the paper takes 1,000 "
    "draws. The loss drop is the attack's first objective less its best, penalties included.",
    "MSE is in units of the normalised input, as the paper's must be; PSNR is of pixels. LPIPS is "
    "that of SqueezeNet where its backbone is at hand; the paper does not name its network.",
)


@dataclass(frozen=True)
class CheckpointStudy:
    """Networks over their training, attacked in both BatchNorm modes.

    Attributes:
        networks: arguments of ``Recipe`` by name, each beside those of ``training``.
        training: arguments of ``Recipe`` that all networks share, ``checkpoints`` among them.
        num_batches: victims of each checkpoint and mode.
        batch_size: test images in a batch.
        num_draws: gradients for L̃ and L̃cos.
        noise_std: of the draws, in units of the normalised input; the paper has 0.001.
        iterations: of Adam.
        learning_rate: of Adam.
        tv_weight: of total variation.
        statistics_weight: of the BatchNorm prior.
        bootstraps: of the intervals.
        seed: of training, starts and draws.
    """

    networks: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Any]
    num_batches: int
    batch_size: int
    num_draws: int
    noise_std: float
    iterations: int
    learning_rate: float
    tv_weight: float
    statistics_weight: float
    bootstraps: int
    seed: int

    def measure(self, lab: Lab) -> list[Row]:
        """A row for each network, checkpoint, mode and batch."""
        rows: list[Row] = []
        for name, options in self.networks.items():
            recipe = Recipe(seed=self.seed, **{**self.training, **options})
            trained = lab.train(recipe)
            test = lab.data(recipe.data)[1]
            batches = self._batches(test.batch, lab)
            settings = {k: v for k, v in asdict(self).items() if k in _MEASURED}
            settings["recipe"] = asdict(recipe) | {"defense": repr(recipe.defense)}
            for epoch, model in trained.models.items():
                for label, mode in MODES:
                    head: Row = {"network": name, "epoch": epoch, "mode": label}
                    head["accuracy"] = trained.accuracy[epoch]

                    gradient_map = GradientMap(model, batch_norm=mode, device=lab.device)
                    part = f"{name}, epoch {epoch}, {label} mode"
                    found: list[Row] = []
                    for first, count in blocks(0, self.num_batches):
                        where = {"epoch": epoch, "mode": label, "num_batches": count}
                        where |= {"first_batch": first} if first else {}
                        these = batches[first : first + count]
                        compute = partial(self._attack, gradient_map, these, test.spec, lab, first)
                        found += lab.rows(part, {**settings, **where}, compute)
                    rows += [{**head, "batch": i, **row} for i, row in enumerate(found)]
        return rows

    def _batches(self, take: Any, lab: Lab) -> list[Batch]:
        starts = range(0, self.num_batches * self.batch_size, self.batch_size)
        batches = [take(list(range(begin, begin + self.batch_size))) for begin in starts]
        return [Batch(b.inputs.to(lab.device), b.targets.to(lab.device)) for b in batches]

    def _attack(
        self,
        gradient_map: GradientMap,
        batches: list[Batch],
        spec: InputSpec,
        lab: Lab,
        first: int = 0,
    ) -> list[Row]:
        prior = self.statistics_weight if gradient_map.uses_batch_statistics else 0.0
        attack = Inversion("cosine", self.iterations, self.learning_rate, self.tv_weight, prior)
        rows: list[Row] = []
        found = attack(gradient_map, batches, spec, self.seed)
        for index, (batch, restarts) in enumerate(zip(batches, found, strict=True)):
            result = restarts[0]
            images = outcomes(result, batch, spec, lab.lpips)
            start = float(result.stats["initial_objective"])
            plain, angular, norm = batch_constants(
                gradient_map, batch, self.noise_std, self.num_draws, self.seed + first + index
            )
            rows.append(
                {
                    "lipschitz": plain,
                    "angular_lipschitz": angular,
                    "gradient_norm": norm,
                    "initial_loss": start,
                    "final_loss": result.objective,
                    "loss_drop": start - result.objective,
                    **{f"{k} {i}": image[k] for i, image in enumerate(images) for k in image},
                }
            )
        return rows


_MEASURED = (
    "num_batches",
    "batch_size",
    "num_draws",
    "noise_std",
    "iterations",
    "learning_rate",
    "tv_weight",
    "statistics_weight",
    "seed",
)


def batch_constants(
    gradient_map: GradientMap, batch: Batch, noise_std: float, num_draws: int, seed: int
) -> tuple[float, float, float]:
    """L̃, L̃cos and ‖g‖ of a whole batch's mean gradient, in float64.

    L̃ = maxₙ ‖g(x + n) − g(x)‖/‖n‖ and L̃cos = maxₙ (1 − cos(g(x + n), g(x)))/(1 − cos(x + n, x)),
    n ~ N(0, noise_std²) on all images of the batch at once; in train mode each draw is normalised
    with its own statistics.
    """
    params: Params = {name: value.double() for name, value in gradient_map.params.items()}

    def oracle(flat: Tensor) -> Tensor:
        moved = Batch(flat.reshape(batch.inputs.shape), batch.targets)
        return ravel(gradient_map(params, moved, gradient_map.buffers))[None]

    point = batch.inputs.double().reshape(1, -1)
    generator = make_generator(seed, purpose="batch lipschitz")
    plain, angular = lipschitz_constants(oracle, point, generator, noise_std, num_draws)
    return float(plain), float(angular), float(oracle(point).norm())


def image_values(rows: list[Row], name: str) -> NDArray:
    """One outcome of every image of some rows, flat; NaN where it is missing."""
    found = [value for row in rows for key, value in row.items() if _is(key, name)]
    return np.array([np.nan if value is None else value for value in found], dtype=float)


def batch_mean(row: Row, name: str) -> float:
    """The mean of an outcome over a batch's images."""
    return float(image_values([row], name).mean())


def _is(key: str, name: str) -> bool:
    start, _, rest = key.rpartition(" ")
    return start == name and rest.isdigit()


def chosen(rows: list[Row], **wanted: str | int) -> list[Row]:
    """The rows of a network, an epoch, a mode."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]
