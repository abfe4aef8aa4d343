"""LAVP's Table 4: how far matching of gradients gets from a start beside the truth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import sample_gradients
from flwr_leakage.params import ravel
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.lab import Lab
from simulations.papers.lavp_proxies import PROXIES, exact_proxies
from simulations.papers.local_figure import final_losses
from simulations.papers.numbers import numbers
from simulations.papers.rank_correlation import judge_positive
from simulations.papers.spearman import spearman
from simulations.papers.training import Recipe

Loss = Literal["L2", "cosine"]
LOSSES: tuple[Loss, ...] = ("L2", "cosine")
OWN = {"L2": ("max", "min"), "cosine": ("ang_max", "ang_min")}
PRINTED = {
    "L2 loss": "307.75, 0.001, 526.42",
    "cosine loss": "0.053, 0.032, 0.014",
    "max": "4.70e5, 1.81, 2.19e6",
    "min": "1.64, 3.70e-6, 3.71",
    "ang_max": "4.53, 0.99, 0.08",
    "ang_min": "1.20e-3, 4.00e-4, 8.00e-5",
    "grad_norm": "24.64, 0.07, 42.02",
}
"""Table 4 of Hong et al. 2024 for its three images."""


@dataclass(frozen=True)
class LocalConvergence:
    """LAVP's Table 4: final loss of plain SGD from x* + 0.1·sign(n).

    The start needs the truth: this measures how matching converges, and is nothing that an
    attacker could run. Model, data, rate and number of steps are not printed in the paper. Here
    two rates are tried for each loss, in units of one over the median of the largest curvatures of
    the images: at the smaller one nearly all images converge, at the larger one those of large
    curvature diverge, as the paper's final losses of several hundred suggest.

    Attributes:
        network: a class of ``flwr_leakage.models``.
        training: further arguments of ``Recipe``.
        num_images: first test images.
        runs: starts of each image.
        steps: of SGD.
        rates: of SGD, see above.
        offset: of each entry of the start from the truth, in units of the normalised input.
        seed: of training and starts.
    """

    network: str
    training: Mapping[str, Any]
    num_images: int
    runs: int
    steps: int
    rates: Sequence[float]
    offset: float
    seed: int

    def run(self, lab: Lab) -> Findings:
        """Final losses beside the proxies, and whether they are ordered alike."""
        rows = self._measure(lab)
        claims: list[Claim] = []
        table: list[Row] = []
        for loss in LOSSES:
            for rate in self.rates:
                final = numbers(rows, f"{loss} loss at {rate}").tolist()
                for name in PROXIES:
                    found = spearman(numbers(rows, name).tolist(), final)
                    table.append(
                        {
                            "loss": loss,
                            "rate × max": rate,
                            "proxy": name,
                            "rho": found.coefficient,
                            "low": found.low,
                            "high": found.high,
                            "n": found.n,
                            "paper's images": f"{PRINTED[name]} for {PRINTED[f'{loss} loss']}",
                        }
                    )
                    if name in OWN[loss]:
                        nan = float("nan")
                        perfect = found.coefficient if found.low is None else None
                        claims.append(
                            judge_positive(
                                f"{name} orders the final {loss} losses, rate {rate} (Table 4).",
                                "the same order for 3 images",
                                nan if found.coefficient is None else found.coefficient,
                                _or(found.low, perfect),
                                _or(found.high, perfect),
                                found.n,
                            )
                        )
        spread = f"{self.runs} runs an image; its final loss is their mean."
        remarks = (
            spread,
            "The offset is in units of the normalised input; its MSE is 0.01. The paper says 0.1.",
            "The proxies are exact; L2 is ‖g − g*‖² and the cosine distance 1 − cos.",
            "The text says that the gradient norm orders neither loss; in the printed table it "
            "orders the L2 losses.",
        )
        return Findings(
            table,
            tuple(claims),
            {"local": final_losses(rows, self.rates)},
            "the truth, as a start beside it: no attacker",
            remarks,
        )

    def _measure(self, lab: Lab) -> list[Row]:
        recipe = Recipe(network=self.network, seed=self.seed, **self.training)
        trained = lab.train(recipe)
        samples = lab.data(recipe.data)[1].batch(list(range(self.num_images)))
        samples = Batch(samples.inputs.to(lab.device), samples.targets.to(lab.device))
        gradient_map = GradientMap(trained.models[recipe.epochs], device=lab.device)
        settings = {**asdict(self), "recipe": asdict(recipe) | {"defense": repr(recipe.defense)}}

        def proxies() -> list[Row]:
            exact = exact_proxies(gradient_map, samples)
            return [{k: exact[k][i] for k in PROXIES} for i in range(len(samples))]

        rows = [dict(row) for row in lab.rows("proxies", settings, proxies)]
        for loss in LOSSES:
            middle = float(np.median(numbers(rows, OWN[loss][0])))
            for rate in self.rates:

                def descend(
                    loss: Loss = loss,
                    step: float = rate / middle,
                    name: str = f"{loss} loss at {rate}",
                ) -> list[Row]:
                    final = final_loss(
                        gradient_map,
                        samples,
                        loss,
                        step,
                        self.steps,
                        self.runs,
                        self.offset,
                        self.seed,
                    )
                    return [
                        {name: float(values.mean()), f"{name}, std": float(values.std())}
                        for values in final
                    ]

                found = lab.rows(f"{loss}, rate {rate}", settings, descend)
                for row, more in zip(rows, found, strict=True):
                    row |= more
        return rows


def final_loss(
    gradient_map: GradientMap,
    samples: Batch,
    loss: Loss,
    learning_rate: float,
    steps: int,
    runs: int,
    offset: float,
    seed: int,
) -> Tensor:
    """Final matching losses (S, runs) of plain SGD from x* + ``offset`` · sign(n), n normal.

    Where it diverges, the last finite loss is the final one.

    Args:
        gradient_map: of a model that uses no statistics of a batch.
        samples: x*, S of them.
        loss: ``L2`` is ‖g − g*‖², whose Hessian at x* is 2JJᵀ; ``cosine`` 1 − cos(g, g*).
        learning_rate: of SGD.
        steps: of SGD.
        runs: starts of each sample.
        offset: in units of the normalised input.
        seed: of the starts.
    """
    params, buffers = gradient_map.params, gradient_map.buffers
    observed = sample_gradients(gradient_map, params, samples, buffers)
    shape = samples.inputs.shape[1:]

    def distance(point: Tensor, target: Tensor, private: Tensor) -> Tensor:
        batch = Batch(point.reshape(1, *shape), target[None])
        gradient = ravel(gradient_map(params, batch, buffers))
        if loss == "L2":
            return (gradient - private).square().sum()
        return 1 - torch.nn.functional.cosine_similarity(gradient, private, dim=0)

    owner = torch.arange(len(samples), device=observed.device).repeat_interleave(runs)

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = owner[rows]
        arguments = points, samples.targets[chosen], observed[chosen]
        gradients, values = vmap(grad_and_value(distance))(*arguments)
        return values, gradients

    truth = samples.inputs.flatten(1)[owner]
    generator = make_generator(seed, purpose="start beside the truth")
    signs = torch.randn(truth.shape, generator=generator).sign().to(truth)
    # Plain gradient descent. A run keeps its last finite loss, and ends once that is zero.
    points, rows = truth + offset * signs, torch.arange(len(truth), device=truth.device)
    losses = truth.new_full((len(truth),), torch.inf)
    for step in range(steps + 1):
        values, gradients = evaluate(points, rows)
        finite = values.isfinite()
        losses[rows[finite]] = values[finite]
        alive = finite & (values > 0)
        if step == steps or not bool(alive.any()):
            break
        rows, points = rows[alive], points[alive] - learning_rate * gradients[alive]
    return losses.reshape(len(samples), runs)


def _or(value: float | None, other: float | None) -> float:
    chosen = other if value is None else value
    return float("nan") if chosen is None else chosen
