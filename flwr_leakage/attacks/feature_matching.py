"""Feature matching: recover a network's features layer by layer, then the input that has them.

For one sample, a network that is a chain of convolutions or linear layers gives its features
away from behind. The last layer's gradient is ``e hᵀ``, with e the logit error, which is the
bias's gradient; so its input h is known. From h follows where the last activation was active,
so the error δ at the layer before is exact, and that layer's weight gradient is *linear* in its
input a: ``M(δ) a = ∂L/∂W`` (Zhu and Blaschko 2021, R-GAP, eq. 8).

Through invertible activations a is the solution of a convex problem, with the forward equations
``z = W ∗ a + b`` and the activation's range; where it has one solution, the next layer can be
treated likewise. Of a that comes from ReLUs it is enough to know where it is zero, as that is the
next layer's error; :mod:`flwr_leakage.attacks.masks` finds the masks and proves most of them.

When the weight gradients have too few equations left, or a mask is not proven, the input is fitted
to the features that were found: a residual that is continuous in x, where the gradient itself
jumps at every flip of a ReLU. Through ReLUs that fit gets stuck, unless it starts with a strong
preference for smooth images that then fades, and with ReLUs blurred by noise that fades likewise.
Its candidates help to prove further masks. What proven masks tell exactly is solved at the end, by
:mod:`flwr_leakage.attacks.mask_equations`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.chain import Link, trace_chain
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.layer_equations import Knowledge, gradient_equations, solve_layer
from flwr_leakage.attacks.mask_equations import (
    MOST_UNKNOWNS,
    MaskEquations,
    gauss_newton,
)
from flwr_leakage.attacks.masks import Masks, MaskSearch
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch, InputSpec, Reconstruction

NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are left out of noisy equations, too."""

CONTRAST = 0.25
"""Typical standard deviation of pixels: the unit of images in their total variation."""

Judge = Callable[[str, Tensor], float]
"""Notes a candidate of a stage, and returns the distance of its gradient."""


@dataclass(frozen=True)
class FeatureMatching(OneByOne):
    """Layer by layer from behind, then a fit of the input; one sample, one plain step.

    Every reconstruction is judged by the attacker's own objective, the relative squared distance
    of the gradients: over the levels at which the walk back may stop, the ways to use masks that
    are not proven, the successive fits, and over restarts.

    Attributes:
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        layer_iterations: of the convex problem of a layer behind invertible activations.
        solved: such a layer counts as found once its relative mean squared residual is below this.
        proof: a mask is proven once sums of errors match the bias's gradient up to this share.
        tries: vertices that are looked at for the mask of one channel, ≥ 1.
        fit_iterations: of the input's fit to the features, where no ReLU is in the way.
        smoothing: weights of the total variation in the successive fits through ReLUs.
        rough_smoothing: of fits before those, to masks that are not all proven, where these are
            too few to start with.
        smoothed_iterations: of each of those.
        blur: in a fit with smoothing weight w, ReLUs are averaged over noise of standard deviation
            ``blur √w`` in their layer's input, ≥ 0.
        near_distance: damped Gauss–Newton on the equations of proven masks is tried once the fits
            bring the gradients within this distance, and after the last one if it gained nothing.
        newton_steps: of that, at most, ≥ 0.
        restarts: starts of the fit, ≥ 1.
        initialisation: of the fit.
        close_distance: proven masks are enough if they bring the gradients within this distance.
        solved_distance: a target is solved once the gradients' distance is at most this.
    """

    purpose: ClassVar[str] = "feature matching"

    rank_tolerance: float = 1e-4
    rank_fraction: float = 0.5
    layer_iterations: int = 700
    solved: float = 1e-9
    proof: float = 5e-8
    tries: int = 12
    fit_iterations: int = 1000
    smoothing: Sequence[float] = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
    rough_smoothing: Sequence[float] = (3e-2, 2e-2, 1e-2)
    smoothed_iterations: int = 200
    blur: float = 2.0
    near_distance: float = 1e-3
    newton_steps: int = 12
    restarts: int = 1
    initialisation: Initialisation = field(default_factory=Grey)
    close_distance: float = 1e-2
    solved_distance: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance must lie in [0, 1), got {self.rank_tolerance}.")
        for name in ("restarts", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("blur", "newton_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in ("smoothing", "rough_smoothing"):
            if not getattr(self, name):
                raise ValueError(f"{name} must hold at least one weight, got none.")

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
        levels, residuals, opened = self._walk_back(problem, chain, generator)
        targets = problem.known_targets
        if targets is None:
            targets = idlg_label(problem.gradient[f"{chain[-1].name}bias"])
        elif targets.is_floating_point():
            targets = targets.double()
        best = torch.zeros(1, *problem.spec.shape, dtype=torch.float64)
        best_value, best_stage, restart = math.inf, "", 0

        def judge(stage: str, inputs: Tensor) -> float:
            nonlocal best, best_value, best_stage
            inputs = problem.spec.clamp(inputs)
            value = gradient_distance(problem, Batch(inputs, targets))
            if value < best_value:
                best, best_value, best_stage = inputs, value, stage
            return value

        for restart in range(self.restarts):
            start = self.initialisation(problem.spec, 1, restart, generator).double()
            candidates = (
                self._fit_with_masks(problem, chain, levels, *opened, start, judge)
                if opened
                else self._fit_exact(problem.spec, chain, levels, start, judge)
            )
            if any(value <= self.solved_distance for value in candidates):
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
                "proven_masks": int(opened[1].certain.sum()) if opened else 0,
                "masks": len(opened[1].certain) if opened else 0,
                "stage": best_stage,
                "restart": restart,
            },
        )

    def _walk_back(
        self, problem: Problem, chain: list[Link], generator: torch.Generator
    ) -> tuple[list[Knowledge], list[float], tuple[MaskSearch, Masks] | None]:
        """Knowledge about the inputs of the layers, from the last but one to the first.

        Also the residuals of the convex problems, and the masks at which the walk ended, if not
        all of them are proven.
        """
        last = chain[-1]
        bias = problem.gradient.get(f"{last.name}bias")
        if bias is None:
            raise ValueError("feature matching needs the last layer's bias, the model has none.")
        outputs = mean_feature(problem.gradient[f"{last.name}weight"], bias)[None]
        errors = last.pull_back(bias[None])
        levels: list[Knowledge] = []
        residuals: list[float] = []
        for position in range(len(chain) - 2, -1, -1):
            link = chain[position]
            assert link.activation is not None
            errors = errors.reshape(1, *link.output_shape)
            slope = link.activation.slope(outputs.reshape(errors.shape))
            levels.append(self._know(problem, link, outputs, errors * slope))
            equations = levels[-1].equations
            if position == 0 or len(equations.rows) < self.rank_fraction * len(equations.rows.T):
                break
            before = chain[position - 1]
            activation = before.activation
            assert activation is not None
            errors = link.pull_back(levels[-1].errors)
            if activation.has_kink:
                if before.bias_gradient is None:
                    break
                search = MaskSearch(
                    equations.of_channels(len(before.scale)),
                    errors.reshape(len(before.scale), -1) * before.scale[:, None],
                    before.bias_gradient,
                    self.proof,
                )
                masks = search.begin(self.tries, generator)
                if not masks.certain.all():
                    return levels, residuals, (search, masks)
                outputs = masks.features
                continue
            inputs, residual = solve_layer(
                levels[-1], activation.low, activation.high, self.layer_iterations
            )
            residuals.append(residual)
            if residual > self.solved:
                break
            outputs = inputs.clamp(activation.low, activation.high)
        return levels, residuals, None

    def _know(
        self,
        problem: Problem,
        link: Link,
        outputs: Tensor,
        errors: Tensor,
        trust: Tensor | float = 1.0,
        channels: Tensor | None = None,
    ) -> Knowledge:
        """What a layer's outputs and their errors ∂L/∂outputs tell about its input."""
        assert link.activation is not None
        outputs = outputs.reshape(1, *link.output_shape)
        per_channel = (-1,) + (1,) * (outputs.ndim - 2)
        errors = errors.reshape(outputs.shape) * link.scale.reshape(per_channel)
        gradient = problem.gradient[f"{link.name}weight"]
        equations = gradient_equations(link, errors, gradient, self.rank_tolerance, channels)
        return Knowledge(link, outputs, errors, equations, trust)

    def _fit_exact(
        self,
        spec: InputSpec,
        chain: list[Link],
        levels: list[Knowledge],
        start: Tensor,
        judge: Judge,
    ) -> Iterator[float]:
        """Distances of inputs that explain the deepest level, and then the last one that is sure.

        A walk that went one layer too far has features that are roughly right and errors that
        are not; the fit to them is then a start for the level before.
        """
        inputs = self._fit_all(spec, chain, levels[-1], start)
        yield judge("deepest", inputs)
        if len(levels) > 1:
            yield judge("sure", self._fit_all(spec, chain, levels[-2], inputs))

    def _fit_all(
        self, spec: InputSpec, chain: list[Link], level: Knowledge, start: Tensor
    ) -> Tensor:
        """Fit the input to one level: at once, or with fading smoothing where ReLUs are before."""
        before = chain[: chain.index(level.link) + 1]
        if any(link.activation and link.activation.has_kink for link in before):
            for weight in self.smoothing:
                start = self._fit(spec, chain, [level], start, weight)
            return start
        return self._fit(spec, chain, [level], start, 0.0)

    def _fit_with_masks(
        self,
        problem: Problem,
        chain: list[Link],
        levels: list[Knowledge],
        search: MaskSearch,
        masks: Masks,
        start: Tensor,
        judge: Judge,
    ) -> Iterator[float]:
        """Distances of successive fits with fading smoothing, masks being found anew from each.

        With all masks as far as they are believed, and then with the proven ones; or with these
        from the start, if that explains the gradient better after one fit, as long as it leads
        anywhere. Then the proven masks' equations are solved.
        """
        position = chain.index(levels[-1].link) - 1
        link = chain[position]
        errors = levels[-1].link.pull_back(levels[-1].errors).reshape(masks.active.shape)
        scale = link.scale.reshape((-1,) + (1,) * (len(link.output_shape) - 1))

        def fit(masks: Masks, inputs: Tensor, proven: bool, weight: float) -> Tensor:
            features, determined = search.settle(masks)
            trusted = determined & (masks.certain[:, None] | ~(search.is_open | proven))
            level = self._know(
                problem,
                link,
                features,
                errors * masks.active,
                trusted.reshape(1, *link.output_shape).double(),
                masks.certain if proven else None,
            )
            return self._fit(problem.spec, chain, [*levels, level], inputs, weight)

        ways = [True] * bool(masks.certain.any()) + [False]
        first = {True: self.smoothing[0], False: self.rough_smoothing[0]}
        fits, values = {}, {}
        for proven in ways:
            fits[proven] = fit(masks, start, proven, first[proven])
            values[proven] = judge(_stage(proven), fits[proven])
            if values[proven] <= self.close_distance:
                break

        def refine(inputs: Tensor) -> Masks:
            features = _features(chain[:position], inputs)
            return search.refine(
                masks,
                link.preactivation(features).reshape(masks.active.shape),
                link.patches(features),
                problem.gradient[f"{link.name}weight"].flatten(1),
            )

        def equations_at(inputs: Tensor) -> MaskEquations:
            nonlocal masks
            masks = refine(inputs)
            features, determined = search.settle(masks)
            settled = Masks(features, masks.active, masks.certain)
            own = gradient_equations(
                link,
                (errors * masks.active).reshape(1, *link.output_shape) * scale,
                problem.gradient[f"{link.name}weight"],
                NEGLIGIBLE,
                masks.certain,
            ).faded(self.rank_tolerance)
            behind = levels[-1].equations.of_channels(len(masks.certain))
            return MaskEquations(chain[:position], link, settled, determined, own, behind)

        def improve(inputs: Tensor) -> float:
            if not (
                masks.certain.any()
                and inputs.numel() <= MOST_UNKNOWNS
                and all(_is_relu(before) for before in chain[:position])
            ):
                return math.inf
            found = gauss_newton(equations_at, inputs, self.newton_steps)
            return min((judge("exact equations", each) for each in found), default=math.inf)

        for way in sorted(values, key=values.__getitem__):
            inputs = fits[way]
            stages = [(True, weight) for weight in self.smoothing[1:]]
            if not way:
                stages = [(False, weight) for weight in self.rough_smoothing[1:]] + stages
            was_near = False
            for proven, weight in stages:
                masks = refine(inputs)
                if proven and not masks.certain.any():
                    break
                inputs = fit(masks, inputs, proven, weight)
                values[way] = min(values[way], judge(_stage(proven), inputs))
                if values[way] <= self.near_distance and not was_near:
                    was_near = True
                    exact = improve(inputs)
                    if exact < values[way]:
                        values[way] = exact
                        break
                yield values[way]
            else:
                values[way] = min(values[way], improve(inputs))
            yield values[way]
            if not way or values[way] <= self.close_distance:
                break

    def _fit(
        self,
        spec: InputSpec,
        chain: list[Link],
        levels: Sequence[Knowledge],
        start: Tensor,
        weight: float,
    ) -> Tensor:
        """Fit the input to layers' outputs and their weights' gradients.

        Args:
            spec: the public facts about the data.
            chain: all layers.
            levels: what is known.
            start: of the fit.
            weight: of the total variation; none means that no ReLU is in the way.
        """
        by_link = {id(level.link): level for level in levels}
        deepest = max(chain.index(level.link) for level in levels)
        scales = {}
        for level in levels:
            gradient = level.equations.values.square().sum().clamp_min(1e-30)
            scales[id(level.link)] = (
                gradient, level.forward_size().clamp_min(1e-30) if weight else gradient
            )  # fmt: skip

        blur = self.blur * weight**0.5

        def loss(flat: Tensor) -> Tensor:
            features = flat.reshape(start.shape)
            pixels = spec.denormalize(features) / CONTRAST
            value = weight * smooth_variation(pixels) if weight else flat.new_zeros(())
            for position, link in enumerate(chain[: deepest + 1]):
                level = by_link.get(id(link))
                if level is not None:
                    gradient, forward = scales[id(link)]
                    value = value + level.forward_residual(features).square().sum() / forward
                    value = value + level.gradient_residual(features).square().sum() / gradient
                if position < deepest:
                    features = _features([link], features, blur if position < deepest - 1 else 0.0)
            return value

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(loss)(points[0])
            return value[None], gradient[None]

        optimizer = (
            LBFGS(self.smoothed_iterations, relative_tolerance=1e-3)
            if weight
            else LBFGS(self.fit_iterations, tolerance=1e-18, relative_tolerance=1e-3)
        )
        return optimizer(evaluate, start.reshape(1, -1)).points.reshape(start.shape)


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Total variation of images (B, C, H, W), with |d| replaced by √(d² + kink²)."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )


def _stage(proven: bool) -> str:
    return "proven masks" if proven else "all masks"


def _is_relu(link: Link) -> bool:
    return link.activation is not None and link.activation.has_kink


def _features(links: list[Link], inputs: Tensor, blur: float = 0.0) -> Tensor:
    """The output of a piece of a chain.

    With a blur, that of ReLUs is E max(z + n, 0) = z Φ(z/σ) + σ φ(z/σ), where n is normal with
    the standard deviation σ that noise of standard deviation ``blur`` in the layer's input makes.
    """
    for link in links:
        assert link.activation is not None
        z = link.preactivation(inputs)
        if blur and link.activation.has_kink:
            per_channel = (-1,) + (1,) * (z.ndim - 2)
            gain = link.scale.abs() * link.weight.flatten(1).norm(dim=1)
            deviation = (blur * gain).clamp_min(1e-12).reshape(per_channel)
            ratio = z / deviation
            density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
            inputs = z * torch.special.ndtr(ratio) + deviation * density
        else:
            inputs = link.activation.function(z)
    return inputs
