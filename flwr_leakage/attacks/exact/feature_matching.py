"""Feature matching: recover a network's features layer by layer, then the input that has them.

For one sample, a network that is a chain of convolutions or linear layers gives its features
away from behind. The last layer's gradient is ``e hᵀ``, with e the logit error, which is the
bias's gradient; so its input h is known. From h follows where the last activation was active,
so the error δ at the layer before is exact, and that layer's weight gradient is *linear* in its
input a: ``M(δ) a = ∂L/∂W`` (Zhu and Blaschko 2021, R-GAP, eq. 8).

Through invertible activations a is the solution of a convex problem, with the forward equations
``z = W ∗ a + b`` and the activation's range; where it has one solution, the next layer can be
treated likewise. Of a that comes from ReLUs it is enough to know where it is zero, as that is the
next layer's error; :mod:`flwr_leakage.attacks.exact.masks` finds the masks and proves most of them.

When the weight gradients have too few equations left, or a mask is not proven, the input is
sought that meets what was found: equations that are continuous in x, where the gradient itself
jumps at every flip of a ReLU. Through ReLUs Gauss–Newton would get stuck in the nearest local
minimum, unless it starts with a prior of images and with blurred ReLUs that fade together
(:mod:`flwr_leakage.attacks.exact.fading_prior`). Its candidates help to prove further masks, whose
equations (:mod:`flwr_leakage.attacks.exact.mask_equations`) bring the next candidate nearer.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.chain import Link, trace_chain
from flwr_leakage.attacks.exact.fading_prior import Fading, Solver, fade
from flwr_leakage.attacks.exact.layer_equations import (
    Knowledge,
    Whitened,
    gradient_equations,
    solve_layer,
)
from flwr_leakage.attacks.exact.mask_equations import (
    MOST_UNKNOWNS,
    MaskEquations,
    gauss_newton,
)
from flwr_leakage.attacks.exact.masks import Masks, MaskSearch
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior

NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are left out of noisy equations, too."""

FIRST = Fading(10.0, 3e-3, 0.3, 0.8, 60)
"""With the masks that are proven at the start."""

MIDDLE = Fading(0.3, 1e-3, 0.3, 0.8, 120)
"""With more of them. The last weight falls to a tenth when no mask was proven."""

MOST_STALLS = 2
"""Candidates in a row that prove no mask before a deep fading."""

DEEP = ((1e-2, 0.8), (10.0, 1.5))
"""First weight and blur of a deep fading from the best candidate; and of one from grey, if the
former does not meet the equations."""

FITTED_FIRST = 1e-4
"""First weight with the prior that is fitted to the best candidate."""

Judge = Callable[[str, Tensor], float]
"""Notes a candidate of a stage, and returns the distance of its gradient."""


@dataclass(frozen=True)
class FeatureMatching(OneByOne):
    """Layer by layer from behind, then a fit of the input; one sample, one plain step.

    Every reconstruction is judged by the attacker's own objective, the relative squared distance
    of the gradients: over the levels at which the walk back may stop, the ways to use masks that
    are not proven, and the successive fits.

    Attributes:
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        layer_iterations: of the convex problem of a layer behind invertible activations.
        solved: such a layer counts as found once its relative mean squared residual is below this.
        proof: a mask is proven once sums of errors match the bias's gradient up to this share.
        fit_iterations: of the input's fit to the features, where no ReLU is in the way.
        rounds: candidates through ReLUs, at most, ≥ 1.
        last_weight: of the prior in deep fadings, > 0.
        factor: from one weight to the next in these, in (0, 1).
        iterations: of conjugate gradients in each of their steps, ≥ 1.
        near: the last of them ends once ‖r‖², of the equations in units, is at most this.
        enough: … and the one with a fitted prior that then follows once it is at most this.
        newton_steps: of damped Gauss–Newton without a prior after that, at most, ≥ 0.
        initialisation: of the fit where no ReLU is in the way.
    """

    purpose: ClassVar[str] = "feature matching"

    rank_tolerance: float = 1e-4
    rank_fraction: float = 0.5
    layer_iterations: int = 700
    solved: float = 1e-9
    proof: float = 5e-8
    fit_iterations: int = 1000
    rounds: int = 12
    last_weight: float = 1e-8
    factor: float = 0.3
    iterations: int = 200
    near: float = 1e-3
    enough: float = 1e-5
    newton_steps: int = 8
    initialisation: Initialisation = field(default_factory=Grey)

    def __post_init__(self) -> None:
        if not 0 <= self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance must lie in [0, 1), got {self.rank_tolerance}.")
        for name in ("rounds", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.newton_steps < 0:
            raise ValueError(f"newton_steps must be at least 0, got {self.newton_steps}.")
        if not 0 < self.last_weight < FITTED_FIRST:
            raise ValueError(
                f"last_weight must lie in (0, {FITTED_FIRST:g}), got {self.last_weight}."
            )
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must lie in (0, 1), got {self.factor}.")

    def solve(self, problem: Problem, generator: torch.Generator, restart: int) -> Reconstruction:
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
        levels, residuals, hidden = self._walk_back(problem, chain)
        last_bias = problem.gradient[f"{chain[-1].name}bias"]
        targets = assume_targets(problem, lambda *_: idlg_label(last_bias), generator).values
        best = torch.zeros(1, *problem.spec.shape, dtype=torch.float64)
        best_value, best_stage = math.inf, ""

        def judge(stage: str, inputs: Tensor) -> float:
            nonlocal best, best_value, best_stage
            inputs = problem.spec.clamp(inputs)
            value = gradient_distance(problem, Batch(inputs, targets))
            if value < best_value:
                best, best_value, best_stage = inputs, value, stage
            return value

        if hidden is not None:
            for candidate in self._fit_through_relus(problem, chain, hidden):
                judge(*candidate)
        else:
            start = self.initialisation(problem.spec, 1, restart, generator).double()
            self._fit_exact(chain, levels, start, judge)
        if not math.isfinite(best_value):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(best, targets),
            objective=best_value,
            stats={
                "cpu_seconds": time.process_time() - began,
                "ranks": [len(level.equations.rows) for level in levels],
                "positions": [level.equations.rows.shape[1] for level in levels],
                "layer_residuals": residuals,
                "proven_masks": hidden.num_proven if hidden else 0,
                "masks": len(hidden.masks.certain) if hidden else 0,
                "stage": best_stage,
            },
        )

    def _walk_back(
        self, problem: Problem, chain: list[Link]
    ) -> tuple[list[Knowledge], list[float], "Hidden | None"]:
        """Knowledge about the inputs of the layers, from the last but one to the first.

        Also the residuals of the convex problems, and the ReLUs at which the walk ended.
        """
        last = chain[-1]
        bias = problem.gradient.get(f"{last.name}bias")
        if bias is None:
            raise ValueError("feature matching needs the last layer's bias, the model has none.")
        outputs = mean_feature(problem.gradient[f"{last.name}weight"], bias)[None]
        errors = last.pull_back(bias[None])
        trust: Tensor | float = 1.0
        levels: list[Knowledge] = []
        residuals: list[float] = []
        hidden: Hidden | None = None
        for position in range(len(chain) - 2, -1, -1):
            link = chain[position]
            assert link.activation is not None
            errors = errors.reshape(1, *link.output_shape)
            slope = link.activation.slope(outputs.reshape(errors.shape))
            level = self._know(problem, link, outputs, errors * slope, trust)
            levels.append(level)
            if position == 0:
                break
            before, rows = chain[position - 1], level.equations.rows
            activation = before.activation
            assert activation is not None
            if len(rows) < self.rank_fraction * len(rows.T):
                if hidden is None and activation.has_kink:
                    hidden = Hidden.unknown(position - 1, before, level)
                break
            errors = link.pull_back(level.errors)
            if activation.has_kink:
                if before.bias_gradient is None:
                    hidden = Hidden.unknown(position - 1, before, level)
                    break
                search = MaskSearch(
                    level.equations.of_channels(len(before.scale)),
                    errors.reshape(len(before.scale), -1) * before.scale[:, None],
                    before.bias_gradient,
                    problem.gradient[f"{before.name}weight"].flatten(1),
                    self.proof,
                )
                masks = search.begin()
                hidden = Hidden(position - 1, search, masks, level)
                if not masks.certain.all():
                    break
                features, determined = search.settle(masks)
                outputs = torch.where(determined & masks.active, features, masks.features)
                trust = determined.reshape(1, *before.output_shape).double()
                continue
            hidden, trust = None, 1.0
            inputs, residual = solve_layer(
                level, activation.low, activation.high, self.layer_iterations
            )
            residuals.append(residual)
            if residual > self.solved:
                break
            outputs = inputs.clamp(activation.low, activation.high)
        return levels, residuals, hidden

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
        self, chain: list[Link], levels: list[Knowledge], start: Tensor, judge: Judge
    ) -> None:
        """Judge inputs that explain the deepest level, and then the last one that is sure.

        A walk that went one layer too far has features that are roughly right and errors that
        are not; the fit to them is then a start for the level before.
        """
        inputs = self._fit(chain, levels[-1], start)
        judge("deepest", inputs)
        if len(levels) > 1:
            judge("sure", self._fit(chain, levels[-2], inputs))

    def _fit(self, chain: list[Link], level: Knowledge, start: Tensor) -> Tensor:
        """Fit the input to one layer's outputs and its weights' gradient, by L-BFGS."""
        before = chain[: chain.index(level.link)]
        size = level.equations.values.square().sum().clamp_min(1e-30)

        def loss(flat: Tensor) -> Tensor:
            features = _features(before, flat.reshape(start.shape))
            value = level.forward_residual(features).square().sum()
            return (value + level.gradient_residual(features).square().sum()) / size

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(loss)(points[0])
            return value[None], gradient[None]

        optimizer = LBFGS(self.fit_iterations, tolerance=1e-18, relative_tolerance=1e-3)
        return optimizer(evaluate, start.reshape(1, -1)).points.reshape(start.shape)

    def _fit_through_relus(
        self, problem: Problem, chain: list[Link], hidden: "Hidden"
    ) -> list[tuple[str, Tensor]]:
        """The best of successive candidates, each of which may prove masks for the next.

        Fadings become deep with all masks proven, or once two candidates in a row proved none.
        One that meets the equations is the last; it is refined with a prior fitted to it, and
        by Gauss–Newton. The best candidate has the least ‖r‖² in the last equations, which are
        continuous as the gradient is not. If no mask at all is proven the gradient is not exact:
        then no fading is deep, as the equations must not be met to the last digit, and nor do
        they choose.

        Returns:
            Its stage and the input; or those of all candidates, for the gradient to choose.
        """
        solver = Solver(ImagePrior.of(problem.spec))
        candidates: list[tuple[str, Tensor]] = []
        stalls = deeps = 0
        value = math.inf
        for number in range(self.rounds):
            is_deep = hidden.is_known or stalls >= MOST_STALLS
            if is_deep and hidden.is_doubtful:
                return candidates
            if deeps == len(DEEP):
                break
            equations = self._equations(problem, chain, hidden)
            start = solver.prior.grey
            fading = MIDDLE._replace(last=MIDDLE.last * 0.1**stalls) if number else FIRST
            if is_deep:
                deeps = deeps + 1 if number else len(DEEP)
                fading = self._deep(*DEEP[deeps - 1], self.near)
            if deeps < len(DEEP):
                start = _nearest(equations, candidates, start)
            inputs, value = fade(equations, start, fading, solver)
            candidates.append(("deep fading" if is_deep else "fading", inputs))
            if is_deep and value <= self.near:
                candidates.append(("fitted prior", self._refit(equations, inputs, solver.prior)))
                break
            proven = hidden.num_proven
            hidden.refine(chain, inputs)
            stalls, deeps = (stalls + 1, deeps) if hidden.num_proven == proven else (0, 0)
        if value <= self.near and inputs.numel() <= MOST_UNKNOWNS and hidden.num_proven:

            def equations_at(inputs: Tensor) -> MaskEquations:
                hidden.refine(chain, inputs)
                return self._equations(problem, chain, hidden)

            for found in gauss_newton(equations_at, candidates[-1][1], self.newton_steps):
                candidates.append(("exact equations", found))
        equations = self._equations(problem, chain, hidden)
        return [min(candidates, key=lambda each: equations.sum_of_squares(each[1]))]

    def _deep(self, first: float, blur: float, enough: float) -> Fading:
        """A fading to the last weight, or until ‖r‖² is enough."""
        return Fading(first, self.last_weight, self.factor, blur, self.iterations, True, enough)

    def _refit(self, equations: MaskEquations, inputs: Tensor, prior: ImagePrior) -> Tensor:
        """Fade the prior that has the spectrum of a candidate."""
        solver = Solver(prior.fitted(inputs))
        return fade(equations, inputs, self._deep(FITTED_FIRST, DEEP[0][1], self.enough), solver)[0]

    def _equations(self, problem: Problem, chain: list[Link], hidden: "Hidden") -> MaskEquations:
        """What the masks that are proven, and the layer behind them, tell about the input."""
        link, masks = chain[hidden.position], hidden.masks
        determined = torch.zeros_like(masks.active)
        if hidden.search is not None and hidden.num_proven:
            features, determined = hidden.search.settle(masks)
            masks = replace(masks, features=features)
        own = self._own_equations(problem, link, hidden)
        return MaskEquations.of(
            chain[: hidden.position], link, masks, determined, own, hidden.behind
        )

    def _own_equations(self, problem: Problem, link: Link, hidden: "Hidden") -> Whitened | None:
        """Those of the layer's own weight gradient, for the masks that are proven."""
        if hidden.search is None or not hidden.num_proven:
            return None
        if hidden.num_stated != hidden.num_proven:
            errors = hidden.search.errors * hidden.masks.active
            stated = gradient_equations(
                link,
                errors.reshape(1, *link.output_shape),
                problem.gradient[f"{link.name}weight"],
                NEGLIGIBLE,
                hidden.masks.certain,
            )
            hidden.own = stated.faded(self.rank_tolerance) if len(stated.rows) else None
            hidden.num_stated = hidden.num_proven
        return hidden.own


@dataclass
class Hidden:
    """ReLUs whose masks are sought.

    Attributes:
        position: of their layer in the chain.
        search: for their masks; ``None`` where nothing tells about these.
        masks: what is believed so far.
        behind: what is known of the next layer.
        own: what the layer's own weight gradient states, of as many masks as ``num_stated``.
    """

    position: int
    search: MaskSearch | None
    masks: Masks
    behind: Knowledge
    own: Whitened | None = None
    num_stated: int = 0

    @classmethod
    def unknown(cls, position: int, link: Link, behind: Knowledge) -> "Hidden":
        """ReLUs of a layer of which nothing is proven, nor will be."""
        count = len(link.scale)
        features = torch.zeros(link.output_shape, dtype=torch.float64).reshape(count, -1)
        none = torch.zeros(count, dtype=torch.bool)
        return cls(position, None, Masks(features, features > 0, none), behind)

    @property
    def num_proven(self) -> int:
        """Channels whose mask is proven."""
        return int(self.masks.certain.sum())

    @property
    def is_known(self) -> bool:
        """Whether no more masks can be proven."""
        return self.search is None or bool(self.masks.certain.all())

    @property
    def is_doubtful(self) -> bool:
        """Whether masks could be proven, but none is."""
        return self.search is not None and not self.num_proven

    def refine(self, chain: list[Link], inputs: Tensor) -> None:
        """Try to prove more masks with a candidate input."""
        if self.search is not None and not self.is_known:
            link, features = chain[self.position], _features(chain[: self.position], inputs)
            z = link.preactivation(features).reshape(self.masks.active.shape)
            self.masks = self.search.refine(self.masks, z, link.patches(features))


def _nearest(
    equations: MaskEquations, candidates: list[tuple[str, Tensor]], default: Tensor
) -> Tensor:
    """The candidate that meets equations best."""
    found = (inputs for _, inputs in candidates)
    return min(found, key=equations.sum_of_squares, default=default)


def _features(links: list[Link], inputs: Tensor) -> Tensor:
    """The output of a piece of a chain."""
    for link in links:
        assert link.activation is not None
        inputs = link.activation.function(link.preactivation(inputs))
    return inputs
