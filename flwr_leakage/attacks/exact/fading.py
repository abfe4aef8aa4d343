"""Gauss–Newton through ReLUs, with a prior of images and a blur of the ReLUs that fade together.

An inactive ReLU has no slope, so Gauss–Newton from far away ends in the nearest local minimum.
Here every step minimises, to first order,

    ‖r(x)‖² + α ‖s‖²,   x = μ + L s,

where r are the residuals of the equations, and s is standard normal under the prior (iteratively
regularised Gauss–Newton, Bakushinskii 1992). In r every ReLU is averaged over Gaussian noise, the
*blur*. The weight α falls from step to step, and the width of the noise falls with it.

While α is large, the images stay smooth, and the fit follows only the majority of the equations.
The noise gives a slope to units that are nearly active.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.mask_equations import LinearisedMasks, MaskEquations
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.kept import Kept
from flwr_leakage.attacks.solve.posterior import Solver
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.low_rank import LowRank


@dataclass(frozen=True)
class Fading:
    """The weights α of the prior in successive steps, and the settings of these steps.

    Attributes:
        first: α of the first step, > last.
        last: value of α that ends the fading once α is at most this, > 0.
        factor: factor of α from each step to the next, in (0, 1).
        blur: standard deviation of the noise at α = 100, ≥ 0. The noise is added to the inputs of
            the ReLUs' layers, and is proportional to the fourth root of α.
        iterations: largest number of iterations of conjugate gradients in a step, ≥ 1.
        sharpens: whether the last steps have no blur, from α = 10 ``last`` on.
        enough: value of ‖r‖² at which the fading also ends, ≥ 0.
    """

    first: float
    last: float
    factor: float
    blur: float
    iterations: int
    sharpens: bool = False
    enough: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.last < self.first:
            raise ValueError(
                f"first and last must be weights with 0 < last < first, got {self.first} and "
                f"{self.last}."
            )
        require(self, "lie in (0, 1)", "factor")
        require(self, "be at least 0", "blur", "enough")
        require(self, "be at least 1", "iterations")

    def blur_at(self, weight: float) -> float:
        """Return the standard deviation of the noise at a weight α of the prior."""
        if self.sharpens and weight <= 10 * self.last:
            return 0.0
        return self.blur * (weight / 100) ** 0.25


@dataclass(frozen=True)
class FadingSolver:
    """Solves the linear systems of successive steps by conjugate gradients, in single precision.

    Conjugate gradients fit the strong directions first, and those that the prior prefers. So
    ending them early regularises. After a slow step, the solver approximates the largest
    eigenvalues of the next step's matrix. A preconditioner takes them out of that step's system
    and of the following ones, whose matrices differ little.

    Attributes:
        prior: the prior of the inputs, x = μ + L s.
        kept: the largest eigenvalues of an earlier step's matrix; none before the first slow step.
        rank: number of columns that these are approximated from.
        tolerance: relative residual at which conjugate gradients stop.
    """

    prior: ImagePrior
    kept: Kept[LowRank]
    rank: int
    tolerance: float

    @classmethod
    def of(
        cls, prior: ImagePrior, rank: int = 500, many: int = 100, tolerance: float = 3e-2
    ) -> "FadingSolver":
        """Return the solver of a first step.

        Args:
            prior: see the attributes.
            rank: see the attributes. A column costs as much as an iteration of conjugate gradients,
                so that a preconditioner serves at least two iterations for each.
            many: number of iterations above which a step counts as slow.
            tolerance: see the attributes.
        """
        return cls(prior, Kept(many, 2 * rank, is_due=False), rank, tolerance)

    def step(
        self, system: LinearisedMasks, slope: Tensor, weight: float, iterations: int
    ) -> tuple[Tensor, int]:
        """Return the step −(LᵀJᵀJL + αI)⁻¹ slope, and the number of its iterations.

        Args:
            system: J, the derivative of the residuals by x, in single precision.
            slope: (C, H, W) half the objective's derivative by the coordinates s.
            weight: the weight α of the prior.
            iterations: largest number of iterations of conjugate gradients.
        """
        found = self.kept.get(lambda: approximate(system, self.prior, self.rank))
        inverse = torch.clone if found is None else found.preconditioner(weight)
        product = _normal_product(system, self.prior.single(), batch=1)
        step, taken = Solver(iterations, self.tolerance, inverse)(
            lambda vector: product(vector[None])[0] + weight * vector, -slope.float()
        )
        self.kept.note(taken)
        return step.to(slope.dtype), taken


def fade(
    equations: MaskEquations,
    inputs: Tensor,
    fading: Fading,
    solver: FadingSolver,
    budget: Budget = UNLIMITED,
) -> tuple[Tensor, float]:
    """Return the inputs after one step at every weight of a fading, and their ‖r‖².

    Args:
        equations: the equations with the residuals r.
        inputs: (1, C, H, W) inputs of the start.
        fading: the weights and the settings of the steps.
        solver: the solver of the steps' linear systems, which holds the prior.
        budget: the fading ends with the step in which this is spent.

    Returns:
        The inputs x (1, C, H, W) at the end, and ‖r‖² there, with the blur of the last step.
    """
    prior, single = solver.prior, equations.single()
    weight, value = fading.first, math.inf

    def pose(at: Iterate) -> Posed | None:
        nonlocal weight, value
        if at.steps:
            value = at.value - weight * float(at.point.square().sum())
            weight *= fading.factor
        if not (weight > fading.last and value > fading.enough) or (at.steps and budget.is_spent):
            return None
        here, blur = weight, fading.blur_at(weight)
        residual, system = equations.linearise(prior.inputs(at.point), blur)
        slope = prior.pull(system.pull_back()(residual)[0]) + here * at.point
        system = LinearisedMasks(single, system.gates.single(), system.shape)

        def cost(point: Tensor) -> float:
            found = equations.sum_of_squares(prior.inputs(point), blur)
            return found + here * float(point.square().sum())

        before = float(residual.square().sum()) + here * float(at.point.square().sum())

        def solve(_: float) -> tuple[Tensor, int]:
            return solver.step(system, slope, here, fading.iterations)

        return Posed(at.point, before, slope, solve, cost)

    return prior.inputs(descend(pose, prior.coordinates(inputs), Shortening()).point), value


def approximate(system: LinearisedMasks, prior: ImagePrior, rank: int, block: int = 32) -> LowRank:
    """Return the largest eigenvalues of LᵀJᵀJL, approximated from some of its columns.

    These are the columns of the coordinates with the largest deviations under the prior.

    Args:
        system: J, the derivative of the residuals by x, in single precision.
        prior: the prior x = μ + L s.
        rank: the number of columns; all are taken if the matrix has fewer.
        block: number of columns that are computed at once.
    """
    smoothest = prior.deviations.flatten().argsort(descending=True)[:rank]
    units = torch.zeros(len(smoothest), math.prod(system.shape))
    units[torch.arange(len(units)), smoothest] = 1
    single = prior.single()
    columns = [
        _normal_product(system, single, len(part))(part.reshape(-1, *system.shape))
        for part in units.split(block)
    ]
    return LowRank.from_columns(torch.cat(columns).flatten(1), smoothest)


def _normal_product(
    system: LinearisedMasks, prior: ImagePrior, batch: int
) -> Callable[[Tensor], Tensor]:
    """Return the map from vectors v (batch, C, H, W) of coordinates to the products LᵀJᵀJL v.

    Args:
        system: J, the derivative of the residuals by x, in single precision.
        prior: the prior x = μ + L s, in single precision.
        batch: number of vectors at once.
    """
    pull = system.pull_back(batch)
    return lambda steps: prior.pull(pull(system.push(prior.push(steps))))
