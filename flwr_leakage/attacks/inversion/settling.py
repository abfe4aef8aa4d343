"""The end of a run: each unit is blurred by its own posterior deviation, weights follow residuals.

Where a run ends, masks of units near zero are mere guesses, and a wrong one moves the gradient as
much as a right one. The equations, solved to first order, leave a normal posterior of the images.
Draws of it tell how far each unit may still move. Units whose sign is settled keep their kink,
doubtful ones are averages over both masks. What masks get wrong is no noise, so variances are read
from the residual, kernel by kernel and feature by feature: a wrong mask spoils those equations that
its unit has a part in, and others stay as sure as they were. Both fade by themselves, as equations
are met. What they leave open is the prior's: at first the run's own, then, as there is an image to
tell kinds of patches by, :class:`flwr_leakage.spectral.patch_prior.PatchPrior`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, Stopwatch
from flwr_leakage.attacks.inversion.annealing import Candidate, Equations, residuals
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchPrior

WIDENING = 40.0
"""First blur over the relative distance of the equations, between its limits."""

TIGHT = 1e-3
"""Tolerance of a draw's linear system: its right side is mostly what the equations tell, and the
draw what they do not."""

POOLED = 2.0
"""Draws' worth of a channel's mean square in that of each unit: a few draws tell it badly."""

TINIEST = 1e-9
"""Least width of a blur: one of zero has none to divide by."""


@dataclass(frozen=True)
class Settling:
    """How long the end of one image is worked at.

    Attributes:
        steps: ≥ 0; at 0 there is no such end.
        products: with the Jacobian of one gradient, or its transpose, at most, about, ≥ 1; one
            with that of n local steps counts n times. A quarter is for one draw of the posterior
            in each step. What that leaves unsolved counts as unknown.
        before: share in (0, 1] of a run's own products that the run before this end takes.
        least: blur of the first draw at least, in posterior deviations, > 0. It is the wider, the
            worse equations are met.
        most: … at most.
        last: … of the last draw, > 0.
        patches_from: share of the steps, ≥ 0, after which the prior is of patches; above 1 it
            never is.
        candidates: of several runs, so many are gone on from, the most likely ones, ≥ 1.

    Where a budget does not allow for all products, each step takes fewer.
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
        self, model: Equations, likelihood: Likelihood, start: Candidate, budget: Budget
    ) -> Candidate:
        """Go on from a run's candidate to the end.

        Args:
            model: what is computed of a candidate, of one image.
            likelihood: what was observed of it.
            start: where a run ended.
            budget: looked at between steps.
        """
        if not self.steps:
            return start
        prior = model.prior
        point = torch.stack([prior.coordinates(image[None]) for image in start.inputs.float()])
        first = min(max(WIDENING * math.sqrt(start.distance), self.least), self.most)
        pace = _Pace(self, model.passes, budget)
        run = Doubts(
            model,
            prior,
            likelihood,
            widths=[first * (self.last / first) ** (k / self.steps) for k in range(self.steps)],
            variances=lambda residual: likelihood.variances(residual, 1.0, model.groups),
            solvers=lambda *_: pace.solvers(),
            is_over=pace.is_over,
            patches=PatchPrior.of(prior),
            patches_from=self.patches_from * self.steps,
        )
        end = descend(run.pose, point, Shortening())
        return Candidate.at(
            *(end.point, model, likelihood, end.steps + 1, pace.products),
            f"{start.stage}, settled in {end.steps + 1} steps",
            pace.is_short or budget.is_spent,
        )


class _Pace:
    """Shares products, and CPU seconds, out among the steps that are left."""

    def __init__(self, settling: Settling, passes: int, budget: Budget) -> None:
        self.steps, self.budget, self.products, self.is_short = settling.steps, budget, 0, False
        self.each = max(4, settling.products // (2 * settling.steps * passes))
        self._watch = Stopwatch()

    def solvers(self) -> tuple[Solver, Solver]:
        """Return those of a step and of a draw, which has a quarter of the iterations."""
        quarter = self.each // 4
        return Solver(self.each - quarter), Solver(quarter, TIGHT)

    def is_over(self, at: Iterate, last: Posterior | None) -> bool:
        """Count the products of a step and of its draw; shorten the next ones if time is short."""
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
    """Poses equations whose units are blurred by their own posterior deviations.

    Before each step the posterior that the last equations leave is drawn from. The spread of every
    unit over the draws is its blur.

    Attributes:
        model: the equations.
        prior: the prior of the point, in the point's precision.
        likelihood: what was observed of the equations.
        widths: the blur after each drawing, in posterior deviations.
        variances: maps residuals (P,) to the variance of each.
        solvers: maps equations, their blur, images and weights to how the linear systems of a step
            and of a draw are solved, or to ``None``, which ends the descent.
        is_over: tells whether the descent ends at an iterate, given the last posterior.
        patches: a prior of patches, or ``None``.
        patches_from: the number of the posterior from which on that prior is used.
        draws: how many draws tell the deviations, ≥ 1.
        is_sharp: whether the first step is taken without a blur, before anything is drawn.
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
        """Draw from what the last equations leave open, and pose the next step."""
        if self._last is None and not self.is_sharp:
            self._last = self._linearise(at)
        if self._last is not None and (width := next(self._widths, None)) is not None:
            posterior, _, tight = self._last
            draws = [posterior.draw(tight, self._generator) for _ in range(self.draws)]
            images = [self._inputs(at.point + draw) for draw in (0 * at.point, *draws)]
            found = spreads(self.model, images[0], images[1:])
            widths = [(width * unit).clamp_min(TINIEST) for unit in found]
            self._blurred, self._blur = self.model.blurred_by(widths), 1.0
        if self.is_over(at, self._last[0] if self._last else None):
            return None
        self._last = self._linearise(at)
        return self._last and self._last[0].posed(self._last[1])

    def _inputs(self, point: Tensor) -> Tensor:
        return self.prior.grey + self.prior.push(point)

    def _linearise(self, at: Iterate) -> tuple[Posterior, Solver, Solver] | None:
        """The posterior of the blurred equations at an iterate, and how its systems are solved."""
        model, blur, inputs = self._blurred, self._blur, self._inputs(at.point)
        residual_at = residuals(model, self.likelihood, blur, prior=self.prior)
        residual = residual_at(at.point)
        weights = 1 / self.variances(residual)
        solvers = self.solvers(model, blur, inputs, weights)
        if solvers is None:
            return None
        told = self.patches is not None and self._count >= self.patches_from
        kinds = self.patches.at(inputs) if self.patches is not None and told else None
        here = model.linearize(inputs.to(model.prior.grey), blur)
        posterior = Posterior(
            *(here, model.prior, weights, residual, at.point, residual_at), patches=kinds
        )
        self._count += 1
        return posterior, *solvers


def spreads(model: Equations, centre: Tensor, draws: Sequence[Tensor]) -> list[Tensor]:
    """Posterior deviations of the inputs of every ReLU and pooling, each of its own shape.

    Args:
        model: whose units they are.
        centre: images.
        draws: the same images, drawn from the posterior.
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
        squares = (total + POOLED * shared) / (len(draws) + POOLED)
        found.append(squares.sqrt())
    return found
