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
is continuous in x, where the gradient itself jumps at every flip of a ReLU.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback, failure
from flwr_leakage.attacks.chain import Link, trace_chain
from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.objectives.euclidean import Euclidean
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem, pose, simulate_gradient
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel


@dataclass(frozen=True)
class Whitened:
    """The linear equations ``M a = T`` of a weight gradient, in M's right singular vectors.

    Attributes:
        rows: V (r, P), orthonormal: the directions of a that the gradient determines.
        null: N (P, P − r), orthonormal: the others.
        values: S⁻¹ Uᵀ T (r, C): ``V a = values`` for a of shape (P, C).
    """

    rows: Tensor
    null: Tensor
    values: Tensor


def gradient_equations(
    link: Link,
    errors: Tensor,
    weight_gradient: Tensor,
    rank_tolerance: float,
    certain: Tensor | None = None,
) -> Whitened:
    """Whiten the equations that a layer's weight gradient states about its input.

    Args:
        link: the layer.
        errors: ∂L/∂(W ∗ a + b), (1, *output_shape).
        weight_gradient: ∂L/∂W.
        rank_tolerance: singular values of M below this fraction of the largest are noise.
        certain: output channels (C,) whose errors are exact; the others are left out.
    """
    if certain is not None:
        errors, weight_gradient = errors[:, certain], weight_gradient[certain]
    if isinstance(link.module, nn.Linear):
        matrix, target = errors.reshape(-1, 1), weight_gradient
    else:
        m = link.module
        _, height, width = link.input_shape
        positions = torch.eye(height * width, dtype=errors.dtype)
        patches = F.unfold(
            positions.reshape(-1, 1, height, width),
            m.kernel_size,
            m.dilation,
            m.padding,  # type: ignore[arg-type]
            m.stride,
        )
        channels = errors.shape[1]
        # (output channels · kernel positions, input positions), the same for all input channels
        matrix = torch.einsum("pkq,oq->okp", patches, errors.reshape(channels, -1))
        matrix = matrix.reshape(-1, height * width)
        target = weight_gradient.flatten(2).transpose(1, 2).reshape(len(matrix), -1)
    left, singular, right = torch.linalg.svd(matrix, full_matrices=True)
    rank = int((singular > rank_tolerance * singular[0]).sum())
    values = (left[:, :rank].T @ target) / singular[:rank, None]
    return Whitened(right[:rank], right[rank:].T, values)


@dataclass(frozen=True)
class Knowledge:
    """What is known of the input a of one layer, to be used in a fit.

    Attributes:
        link: the layer that takes a.
        outputs: the layer's known activations, (1, *output_shape).
        errors: ∂L/∂(W ∗ a + b), (1, *output_shape).
        equations: those of its weight gradient.
    """

    link: Link
    outputs: Tensor
    errors: Tensor
    equations: Whitened

    def forward_residual(self, inputs: Tensor) -> Tensor:
        """How far ``z(a)`` is from what the outputs tell, per entry, in units of typical a."""
        link = self.link
        z = link.preactivation(inputs)
        activation = link.activation
        if activation is None:
            residual = z - self.outputs
            weight = torch.ones_like(z)
        else:
            known = activation.invertible(self.outputs)
            target = activation.inverse(self.outputs)
            residual = torch.where(known, z - target, z.clamp_min(0))
            slope = activation.slope(self.outputs)
            weight = torch.where(known, slope / slope.max().clamp_min(1e-30), 1.0)
        gain = link.scale.abs() * link.weight.flatten(1).norm(dim=1)
        return weight * residual / gain.mean().clamp_min(1e-30)

    def gradient_residual(self, inputs: Tensor) -> Tensor:
        """How far a is from the weight gradient's equations, whitened."""
        rows = self.equations.rows
        return rows @ inputs.reshape(-1, rows.shape[1]).T - self.equations.values

    def from_null(self, free: Tensor) -> Tensor:
        """The a that satisfies the gradient's equations with null space coordinates ``free``."""
        flat = self.equations.rows.T @ self.equations.values + self.equations.null @ free
        return flat.T.reshape(1, *self.link.input_shape)


def solve_layer(
    knowledge: Knowledge, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Find the input a of a layer: the convex problem of the module's docstring.

    The gradient's equations hold exactly, in null space coordinates; the forward equations and
    the range [low, high] of a are met in least squares.

    Returns:
        a (1, *input_shape) and the mean squared residual, relative to a's mean square.
    """
    equations = knowledge.equations
    channels = equations.values.shape[1]
    freedom = equations.null.shape[1]
    start = torch.zeros(1, freedom * channels, dtype=equations.rows.dtype)

    def residuals(flat: Tensor) -> Tensor:
        inputs = knowledge.from_null(flat.reshape(freedom, channels))
        outside = (low - inputs).clamp_min(0) + (inputs - high).clamp_min(0)
        forward = knowledge.forward_residual(inputs)
        return torch.cat([forward.flatten(), outside.flatten()])

    if freedom:
        unit = float(residuals(start[0]).square().mean().clamp_min(1e-30))

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(
                lambda flat: residuals(flat).square().mean() / unit
            )(points[0])
            return value[None], gradient[None]

        start = LBFGS(iterations=iterations, tolerance=1e-20, relative_tolerance=1e-3)(
            evaluate, start
        ).points
    solution = knowledge.from_null(start.reshape(freedom, channels))
    error = residuals(start[0]).square().mean() / solution.square().mean().clamp_min(1e-30)
    return solution, float(error)


@dataclass(frozen=True)
class FeatureMatching:
    """Layer by layer from behind, then a fit of the input; one sample, one plain step.

    Every reconstruction is judged by the attacker's own objective, the relative squared distance
    of the gradients: over the levels at which the walk back may stop, and over restarts.

    Attributes:
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        layer_iterations: of the convex problem of a layer.
        fit_iterations: of the input's fit to the features.
        polish_iterations: of matching the gradient itself, from the fitted input.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        restarts: starts of the fit, ≥ 1.
        initialisation: of the fit.
        turns: refinements of the errors at the deepest level from the candidate, ≥ 0.
        solved: a layer counts as found once its relative mean squared residual is below this.
        tolerance: stop once the objective is below this.
    """

    rank_tolerance: float = 1e-4
    layer_iterations: int = 700
    fit_iterations: int = 1000
    polish_iterations: int = 50
    rank_fraction: float = 0.6
    restarts: int = 1
    initialisation: Initialisation = field(default_factory=Grey)
    turns: int = 3
    solved: float = 1e-9
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        if not 0 <= self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance must lie in [0, 1), got {self.rank_tolerance}.")
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}.")

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
        seed = int(torch.randint(2**31, (), generator=generator))
        results = []
        for index, observation in enumerate(observations):
            stream = make_generator(
                seed,
                server_round=observation.server_round,
                client_id=max(observation.client_id, 0),
                purpose="feature matching",
            )
            try:
                problem = pose(gradient_map, spec, observation, threat).to(torch.float64)
                results.append(self.solve(problem, stream))
            except (ValueError, RuntimeError) as error:
                results.append(failure(error))
            if progress is not None:
                objective = results[-1].objective
                progress(AttackProgress(index + 1, len(observations), 1, 1, objective))
        return results

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
            for stage, inputs in self._candidates(problem, chain, levels, start):
                value = _distance(problem, inputs, targets)
                if value > self.tolerance:
                    inputs, value = self._polish(problem, inputs, targets)
                if value < best_value:
                    best, best_value, best_stage = problem.spec.clamp(inputs), value, stage
                if value <= self.tolerance:
                    break
            if best_value <= self.tolerance:
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
            levels.append(self._know(problem, link, outputs, errors, certain))
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
        certain: Tensor | None = None,
    ) -> Knowledge:
        """What a layer's outputs and their errors ∂L/∂outputs tell about its input."""
        assert link.activation is not None
        outputs = outputs.reshape(1, *link.output_shape)
        per_channel = (-1,) + (1,) * (outputs.ndim - 2)
        errors = errors.reshape(outputs.shape) * link.activation.slope(outputs)
        errors = errors * link.scale.reshape(per_channel)
        gradient = problem.gradient[f"{link.name}weight"]
        equations = gradient_equations(link, errors, gradient, self.rank_tolerance, certain)
        return Knowledge(link, outputs, errors, equations)

    def _candidates(
        self, problem: Problem, chain: list[Link], levels: list[Knowledge], start: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Inputs that explain what is known, in the order in which they mostly succeed.

        A walk that went one layer too far has features that are roughly right and errors that
        are not, as they are wrong at every kink that was missed. Then the features serve as a
        start for the last level that is sure, and the errors are estimated anew from the
        candidate, in turns with its fit.
        """
        top = levels[-1]
        yield "deepest", self._fit(chain, [top], [top], start)
        if len(levels) == 1:
            return
        sure = levels[-2]
        inputs = self._fit(chain, [top], [], start)
        inputs = self._fit(chain, [sure], [sure], inputs)
        yield "sure", inputs
        for turn in range(self.turns):
            features = _features(chain[: chain.index(top.link) + 1], inputs)
            refreshed = self._know(problem, top.link, features, sure.link.pull_back(sure.errors))
            inputs = self._fit(chain, [sure], [sure, refreshed], inputs)
            yield f"turn {turn + 1}", inputs

    def _fit(
        self,
        chain: list[Link],
        forward: list[Knowledge],
        backward: list[Knowledge],
        start: Tensor,
    ) -> Tensor:
        """Fit the input to layers' outputs (``forward``) and gradients (``backward``)."""
        scale = forward[0].equations.values.square().sum().clamp_min(1e-30)
        depth = max(chain.index(level.link) for level in [*forward, *backward])

        def loss(flat: Tensor) -> Tensor:
            features = flat.reshape(start.shape)
            value = flat.new_zeros(())
            for position, link in enumerate(chain[: depth + 1]):
                for level in forward:
                    if level.link is link:
                        value = value + level.forward_residual(features).square().sum()
                for level in backward:
                    if level.link is link:
                        value = value + level.gradient_residual(features).square().sum()
                if position < depth:
                    features = _features([link], features)
            return value / scale

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(loss)(points[0])
            return value[None], gradient[None]

        optimizer = LBFGS(iterations=self.fit_iterations, tolerance=1e-18, relative_tolerance=1e-3)
        return optimizer(evaluate, start.reshape(1, -1)).points.reshape(start.shape)

    def _polish(self, problem: Problem, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Match the gradient itself from a start in the box."""
        spec = problem.spec

        def loss(flat: Tensor) -> Tensor:
            return _gradient_distance(problem, flat.reshape(1, *spec.shape), targets)

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(loss)(points[0])
            return value[None], gradient[None]

        start = spec.clamp(inputs).reshape(1, -1)
        optimizer = LBFGS(iterations=max(1, self.polish_iterations), tolerance=1e-14)
        found = optimizer(evaluate, start)
        return spec.clamp(found.points.reshape(1, *spec.shape)), float(found.values)


def _features(links: list[Link], inputs: Tensor) -> Tensor:
    """The output of a piece of a chain."""
    for link in links:
        assert link.activation is not None
        inputs = link.activation.function(link.preactivation(inputs))
    return inputs


def _gradient_distance(problem: Problem, inputs: Tensor, targets: Tensor) -> Tensor:
    gradient = simulate_gradient(
        problem.gradient_map,
        problem.params,
        problem.buffers,
        problem.schedule,
        Batch(inputs, targets),
    )
    return Euclidean()(gradient, problem.gradient)


def _distance(problem: Problem, inputs: Tensor, targets: Tensor) -> float:
    """The attacker's own objective of an input in the box."""
    return float(_gradient_distance(problem, problem.spec.clamp(inputs), targets).detach())
