"""Feature matching: recover a network's features layer by layer, then the input that has them.

For one sample, a network that is a chain of convolutions or linear layers gives its features
away from behind. The last layer's gradient is ``e hᵀ``, with e the logit error, which is the
bias's gradient; so its input h is known. From h follows where the last activation was active,
so the error δ at the layer before is exact, and that layer's weight gradient is *linear* in its
input a: ``M(δ) a = ∂L/∂W`` (Zhu and Blaschko 2021, R-GAP, eq. 8). Together with the forward
equations ``z = W ∗ a + b`` where the activation tells z, the inequalities ``z ≤ 0`` where it
does not, and the activation's range for a, this is a convex problem in a. Where it has one
solution, the next layer can be treated likewise. When the weight gradients have too few
equations left, the input is fitted to the deepest features that were found: a residual that
is continuous in x, where the gradient itself jumps at every flip of a ReLU. Through ReLUs that
fit gets stuck, unless it starts with a strong preference for smooth images that then fades.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.chain import Link, trace_chain
from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.layer_equations import Knowledge, gradient_equations, solve_layer
from flwr_leakage.attacks.objectives.euclidean import Euclidean
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.records import Batch, Reconstruction


@dataclass(frozen=True)
class FeatureMatching(OneByOne):
    """Layer by layer from behind, then a fit of the input; one sample, one plain step.

    Every reconstruction is judged by the attacker's own objective, the relative squared distance
    of the gradients: over the levels at which the walk back may stop, and over restarts.

    Attributes:
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        layer_iterations: of the convex problem of a layer.
        fit_iterations: of the input's fit to the features, where no ReLU is in the way.
        smoothing: weights of the total variation in the successive fits through ReLUs.
        smoothed_iterations: of each of those.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        restarts: starts of the fit, ≥ 1.
        initialisation: of the fit.
        margin: recovered outputs of a ReLU up to this share of the largest may be zero.
        solved: a layer counts as found once its relative mean squared residual is below this.
        solved_distance: a target is solved once the gradients' distance is at most this.
    """

    purpose: ClassVar[str] = "feature matching"

    rank_tolerance: float = 1e-4
    layer_iterations: int = 700
    fit_iterations: int = 1000
    smoothing: Sequence[float] = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5)
    smoothed_iterations: int = 80
    rank_fraction: float = 0.6
    restarts: int = 1
    initialisation: Initialisation = field(default_factory=Grey)
    margin: float = 0.01
    solved: float = 1e-9
    solved_distance: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance must lie in [0, 1), got {self.rank_tolerance}.")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}.")

    def solve(self, problem: Problem, generator: torch.Generator) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the update stems from several samples or steps, or the model is no chain.
        """
        began = time.process_time()
        if problem.num_samples != 1 or not problem.is_single_gradient:
            raise ValueError(
                f"feature matching takes 1 sample in 1 plain step, got {problem.num_samples} "
                f"samples in {problem.schedule.num_steps} steps."
            )
        chain = trace_chain(problem)
        levels, residuals = self._walk_back(problem, chain)
        targets = problem.known_targets
        if targets is None:
            targets = idlg_label(problem.gradient[f"{chain[-1].name}bias"])
        elif targets.is_floating_point():
            targets = targets.double()
        best = torch.zeros(1, *problem.spec.shape, dtype=torch.float64)
        best_value, best_stage = math.inf, ""
        for restart in range(self.restarts):
            start = self.initialisation(problem.spec, 1, restart, generator).double()
            for stage, inputs in self._candidates(chain, levels, start):
                inputs = problem.spec.clamp(inputs)
                value = _distance(problem, inputs, targets)
                if value < best_value:
                    best, best_value, best_stage = inputs, value, stage
                if value <= self.solved_distance:
                    break
            if best_value <= self.solved_distance:
                break
        if not math.isfinite(best_value):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=Batch(best.to(torch.get_default_dtype()), targets),
            objective=best_value,
            stats={
                "cpu_seconds": time.process_time() - began,
                "ranks": [len(level.equations.rows) for level in levels],
                "positions": [level.equations.rows.shape[1] for level in levels],
                "layer_residuals": residuals,
                "stage": best_stage,
                "restart": restart,
            },
        )

    def _walk_back(
        self, problem: Problem, chain: list[Link]
    ) -> tuple[list[Knowledge], list[float]]:
        """Knowledge about the inputs of the layers, from the last but one to the first."""
        last = chain[-1]
        bias = problem.gradient.get(f"{last.name}bias")
        if bias is None:
            raise ValueError("feature matching needs the last layer's bias, the model has none.")
        outputs = mean_feature(problem.gradient[f"{last.name}weight"], bias)[None]
        errors = last.pull_back(bias[None])
        levels: list[Knowledge] = []
        residuals: list[float] = []
        certain: Tensor | None = None
        for position in range(len(chain) - 2, -1, -1):
            link = chain[position]
            levels.append(self._know(problem, link, outputs, errors, certain, bool(levels)))
            equations = levels[-1].equations
            if position == 0 or len(equations.rows) < self.rank_fraction * len(equations.rows.T):
                break
            activation = chain[position - 1].activation
            assert activation is not None
            inputs, residual = solve_layer(
                levels[-1], activation.low, activation.high, self.layer_iterations
            )
            residuals.append(residual)
            if residual > self.solved:
                break
            unit = math.sqrt(residual) * float(inputs.abs().max())
            outputs = activation.settle(inputs, 10 * unit)
            certain = activation.certain_channels(inputs, 10 * unit, 100 * unit)
            errors = link.pull_back(levels[-1].errors)
        return levels, residuals

    def _know(
        self,
        problem: Problem,
        link: Link,
        outputs: Tensor,
        errors: Tensor,
        certain: Tensor | None,
        estimated: bool,
    ) -> Knowledge:
        """What a layer's outputs and their errors ∂L/∂outputs tell about its input."""
        assert link.activation is not None
        outputs = outputs.reshape(1, *link.output_shape)
        per_channel = (-1,) + (1,) * (outputs.ndim - 2)
        errors = errors.reshape(outputs.shape) * link.activation.slope(outputs)
        errors = errors * link.scale.reshape(per_channel)
        gradient = problem.gradient[f"{link.name}weight"]
        equations = gradient_equations(link, errors, gradient, self.rank_tolerance, certain)
        margin = self.margin * float(outputs.max()) if link.activation.has_kink and estimated else 0
        return Knowledge(link, outputs, errors, equations, margin)

    def _candidates(
        self, chain: list[Link], levels: list[Knowledge], start: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Inputs that explain the deepest level, and then the last one that is sure.

        A walk that went one layer too far has features that are roughly right and errors that
        are not; the fit to them is then a start for the level before.
        """
        inputs = self._fit(chain, levels[-1], start, self.smoothing)
        yield "deepest", inputs
        if len(levels) > 1:
            yield "sure", self._fit(chain, levels[-2], inputs, self.smoothing[-1:])

    def _fit(
        self, chain: list[Link], level: Knowledge, start: Tensor, smoothing: Sequence[float]
    ) -> Tensor:
        """Fit the input to a layer's outputs and its weight's gradient.

        Through ReLUs in successive fits, each with less total variation than the last.
        """
        before = chain[: chain.index(level.link)]
        kinked = any(link.activation and link.activation.has_kink for link in [*before, level.link])
        gradient_scale = level.equations.values.square().sum().clamp_min(1e-30)
        forward_scale = level.forward_size().clamp_min(1e-30) if kinked else gradient_scale

        def minimise(start: Tensor, weight: float, optimizer: LBFGS) -> Tensor:
            def loss(flat: Tensor) -> Tensor:
                inputs = flat.reshape(start.shape)
                features = _features(before, inputs)
                value = level.forward_residual(features).square().sum() / forward_scale
                value = value + level.gradient_residual(features).square().sum() / gradient_scale
                return value + weight * smooth_variation(inputs) if weight else value

            def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
                gradient, value = torch.func.grad_and_value(loss)(points[0])
                return value[None], gradient[None]

            return optimizer(evaluate, start.reshape(1, -1)).points.reshape(start.shape)

        if not kinked:
            return minimise(
                start, 0.0, LBFGS(self.fit_iterations, tolerance=1e-18, relative_tolerance=1e-3)
            )
        inputs = start
        for weight in smoothing:
            optimizer = LBFGS(self.smoothed_iterations, relative_tolerance=1e-3)
            inputs = minimise(inputs, weight, optimizer)
        return inputs


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Total variation of images (B, C, H, W), with |d| replaced by √(d² + kink²)."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )


def _features(links: list[Link], inputs: Tensor) -> Tensor:
    """The output of a piece of a chain."""
    for link in links:
        assert link.activation is not None
        inputs = link.activation.function(link.preactivation(inputs))
    return inputs


def _distance(problem: Problem, inputs: Tensor, targets: Tensor) -> float:
    """The attacker's own objective."""
    with torch.no_grad():
        gradient = simulate_gradient(
            problem.gradient_map,
            problem.params,
            problem.buffers,
            problem.schedule,
            Batch(inputs, targets),
        )
    return float(Euclidean()(gradient, problem.gradient))
