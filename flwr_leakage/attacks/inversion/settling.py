"""End a run of Gauss–Newton by steps that blur each ReLU unit by its own uncertainty.

An equation sets an entry of the update, or a feature that was recovered from it, equal to what the
images predict. At the end of a run, it is a guess which units near zero are on (their masks). As
the slope of a ReLU jumps, a wrong mask changes the gradient, however near zero the unit is. The
equations, solved to first order, leave a normal posterior of the images. Draws from it show how far
the input of each unit may still move. A unit whose sign is certain keeps its kink, and a doubtful
unit is averaged over both masks. A wrong mask spoils the equations of its own unit only. So the
variance of the equations' errors is read from the residual, kernel by kernel and feature by
feature, and the other equations keep their weight. Blur and variances fall with the residual. A
prior decides about the directions of the images that the equations leave open. It is the run's
normal prior at first, and later :class:`flwr_leakage.spectral.patch_prior.PatchPrior`, as the kinds
of patches (flat, smooth, textured or with an edge) are then seen in the images.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, Stopwatch
from flwr_leakage.attacks.inversion.annealing import Equations, RunEnd, residuals
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend, geometric
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchPrior
from flwr_leakage.values import require


@dataclass(frozen=True)
class Settling:
    """The additional steps after a run of Gauss–Newton for one image, which blur each ReLU unit.

    The blur averages a ReLU over noise in its input. Each step draws an image from the posterior. A
    blur is given in posterior deviations, the standard deviation that a unit's input has over such
    draws. If a budget does not allow all products, each step takes fewer.

    Attributes:
        steps: number of steps, ≥ 0; with 0 a run ends without them.
        products: approximate largest number of products with the Jacobian of one gradient or its
            transpose in all steps, ≥ 1. A product with the Jacobian of n local steps counts n
            times. A quarter of them serves the draws. Directions that the linear system of a draw
            leaves unsolved count as unknown.
        before: share in (0, 1] of a run's own limit of products that the run may take if these
            steps follow it.
        least: least blur after the first draw, in posterior deviations, > 0. The blur is larger if
            the equations' predictions are far from the observed numbers.
        most: largest blur after the first draw, in posterior deviations.
        last: blur after the last draw, in posterior deviations, > 0.
        patches_from: share of the steps, ≥ 0, after which the prior of patches is used; above 1 it
            is never used.
        candidates: number of runs that get these steps, the most likely ones first, ≥ 1.
    """

    steps: int = 12
    products: int = 3800
    before: float = 1.0
    least: float = 0.6
    most: float = 2.0
    last: float = 0.08
    patches_from: float = 0.3
    candidates: int = 1

    def __post_init__(self) -> None:
        require(self, "be at least 0", "steps", "patches_from")
        require(self, "be at least 1", "products", "candidates")
        require(self, "lie in (0, 1]", "before")
        if not 0 < self.last <= self.least <= self.most:
            raise ValueError(
                "last, least and most must be positive and ascend, "
                f"got {self.last}, {self.least} and {self.most}."
            )

    def __call__(
        self, model: Equations, likelihood: Likelihood, start: RunEnd, budget: Budget
    ) -> RunEnd:
        """Return the images after further steps, with their fit to ``model``, the equations.

        The steps continue the run of Gauss–Newton that ended at ``start``, and blur each ReLU unit
        by its own uncertainty. The likelihood holds the observed numbers of the equations and their
        noise.
        """
        if not self.steps:
            return start
        prior = model.prior
        point = prior.coordinates(start.inputs.float())
        # The first blur grows with the relative distance at which the run ended, the root of
        # ``start.distance``. The factor 40 was chosen on development draws; no results are kept.
        first = min(max(40.0 * math.sqrt(start.distance), self.least), self.most)
        pace = _Pace(self, model.passes, budget)
        run = Doubts(
            model,
            prior,
            likelihood,
            widths=geometric(first, self.last, self.steps + 1)[:-1],
            variances=lambda residual: likelihood.variances(residual, 1.0, model.groups),
            solvers=lambda *_: pace.solvers(),
            is_over=pace.is_over,
            patches=PatchPrior.of(prior),
            patches_from=self.patches_from * self.steps,
        )
        end = descend(run.pose, point, Shortening())
        return RunEnd.at(
            *(model.gauged(end.point), model, likelihood, end.steps + 1, pace.products),
            f"{start.stage}, settled in {end.steps + 1} steps",
            pace.is_short or budget.is_spent,
        )


class _Pace:
    """The division of the allowed Jacobian products and CPU seconds among the remaining steps.

    Args:
        settling: the settings, with the numbers of steps and products.
        passes: number of gradients that one evaluation of the equations takes.
        budget: the limit of CPU time.
    """

    def __init__(self, settling: Settling, passes: int, budget: Budget) -> None:
        self.steps, self.budget, self.products, self.is_short = settling.steps, budget, 0, False
        self.each = max(4, settling.products // (2 * settling.steps * passes))
        self._watch = Stopwatch()

    def solvers(self) -> tuple[Solver, Solver]:
        """Return the linear solvers of the next step and of the next draw from the posterior.

        The draw gets a quarter of the iterations, and a tighter tolerance. The equations determine
        most of the right side of its linear system, and the draw itself lies in the directions that
        they leave open.
        """
        quarter = self.each // 4
        return Solver(self.each - quarter), Solver(quarter, 1e-3)

    def is_over(self, at: Iterate, last: Posterior | None) -> bool:
        """Return whether no further step follows, and shorten the next steps if time is short.

        ``at`` holds the images' coordinates after the previous step, and that step's outcome.
        ``last`` holds the equations that were linearised for that step.
        """
        assert last is not None
        self.products += last.linear.products
        left = self.steps - at.steps
        seconds = self._watch.seconds / max(1, last.linear.products // 2)
        affordable = self.budget.affordable(left * self.each, seconds)
        if affordable < left * self.each:
            self.each, self.is_short = max(4, affordable // left), True
        self._watch = Stopwatch()
        return not left or self.budget.is_spent


@dataclass
class Doubts:
    """The steps of a descent in which each ReLU unit is blurred by its own uncertainty.

    Before each step, images are drawn from the posterior of the equations linearised at the step
    before. The standard deviation of a unit's input over the draws is its posterior deviation, and
    the unit is blurred by a multiple of it.

    Attributes:
        model: the equations to fit.
        prior: the prior of the images' coordinates, in their precision.
        likelihood: the observed numbers of the equations and their noise.
        widths: the blur after each set of draws, in posterior deviations.
        variances: a map from residuals (P,) to their variances (P,).
        solvers: a map from equations, their blur, images and weights (inverse variances) to two
            linear solvers, that of a step and that of a draw; or to ``None``, to end.
        is_over: a map from the coordinates after a step and its linearised equations to whether the
            descent ends there.
        patches: a prior of patches, or ``None``.
        patches_from: the number of linearisations before the first one with the prior of patches.
        draws: number of draws that estimate the deviations, ≥ 1.
        is_sharp: whether the first step has no blur, and no draws before it.
    """

    model: Equations
    prior: ImagePrior
    likelihood: Likelihood
    widths: Sequence[float]
    variances: Callable[[Tensor], Tensor]
    solvers: Callable[[Equations, float, Tensor, Tensor], tuple[Solver, Solver] | None]
    is_over: Callable[[Iterate, Posterior | None], bool]
    patches: PatchPrior | None = None
    patches_from: float = 0.0
    draws: int = 1
    is_sharp: bool = False

    def __post_init__(self) -> None:
        self._widths, self._generator = iter(self.widths), torch.Generator().manual_seed(0)
        self._last: tuple[Posterior, Solver, Solver] | None = None
        self._blurred, self._blur, self._count = self.model, 0.0, 0

    def pose(self, at: Iterate) -> Posed | None:
        """Return the linear least-squares problem of the next Gauss–Newton step; ``None`` to end.

        ``at`` holds the images' coordinates after the previous step, and that step's outcome.
        """
        at = replace(at, point=self.model.gauged(at.point))
        if self._last is None and not self.is_sharp:
            self._last = self._linearise(at)
        if self._last is not None and (width := next(self._widths, None)) is not None:
            posterior, _, tight = self._last
            draws = [posterior.draw(tight, self._generator) for _ in range(self.draws)]
            images = [self.prior.inputs(at.point + draw) for draw in (0 * at.point, *draws)]
            found = spreads(self.model, images[0], images[1:])
            # Widths are kept above zero, as a blurred ReLU divides by them.
            widths = [(width * unit).clamp_min(1e-9) for unit in found]
            self._blurred, self._blur = self.model.blurred_by(widths), 1.0
        if self.is_over(at, self._last[0] if self._last else None):
            return None
        self._last = self._linearise(at)
        return self._last and self._last[0].posed(self._last[1])

    def _linearise(self, at: Iterate) -> tuple[Posterior, Solver, Solver] | None:
        """Return the blurred equations linearised at coordinates (B, C, H, W), and two solvers.

        One solves for the next step, and one for a draw from the posterior. The result is ``None``
        if ``solvers`` ends the descent.
        """
        model, blur, inputs = self._blurred, self._blur, self.prior.inputs(at.point)
        residual_at = residuals(model, self.likelihood, blur, prior=self.prior)
        residual = residual_at(at.point)
        weights = 1 / self.variances(residual)
        solvers = self.solvers(model, blur, inputs, weights)
        if solvers is None:
            return None
        is_used = self.patches is not None and self._count >= self.patches_from
        kinds = self.patches.at(inputs) if self.patches is not None and is_used else None
        here = model.linearize(inputs.to(model.prior.grey), blur)
        posterior = Posterior(
            *(here, model.prior, weights, residual, at.point, residual_at), patches=kinds
        )
        self._count += 1
        return posterior, *solvers


def spreads(model: Equations, centre: Tensor, draws: Sequence[Tensor]) -> list[Tensor]:
    """Return the standard deviations of the inputs of every ReLU and max pooling over drawn images.

    There is one tensor for each call of such a function, of the shape of its inputs (B, …). The
    draws (B, C, H, W) come from the posterior, and squares are taken around the images ``centre``.
    A unit's mean square is averaged with that of its channel, which counts as two more draws.
    """
    middle = model.kinks(centre)
    sums = [torch.zeros_like(each) for each in middle]
    for draw in draws:
        for total, there, back in zip(sums, model.kinks(draw), middle, strict=True):
            total += (there - back).square()
    found = []
    for total in sums:
        axes = [axis for axis in range(total.ndim) if axis > 1]
        shared = total.mean(axes, keepdim=True) / len(draws)
        # Few draws estimate a unit badly: its channel's mean counts as two more draws (no table
        # shows how the number was chosen).
        squares = (total + 2.0 * shared) / (len(draws) + 2.0)
        found.append(squares.sqrt())
    return found
