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
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.known import single
from flwr_leakage.attacks.exact.mask_equations import MaskEquations
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, follow
from flwr_leakage.attacks.solve.posterior import Kept, Posterior, Solver
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

    @property
    def weights(self) -> list[float]:
        """The weights α of the steps, in falling order."""
        found = [self.first]
        while found[-1] * self.factor > self.last:
            found.append(found[-1] * self.factor)
        return found

    def blur_at(self, weight: float) -> float:
        """Return the standard deviation of the noise at a weight α of the prior."""
        if self.sharpens and weight <= 10 * self.last:
            return 0.0
        return self.blur * (weight / 100) ** 0.25


def fade(
    equations: MaskEquations,
    inputs: Tensor,
    fading: Fading,
    prior: ImagePrior,
    kept: Kept[LowRank],
    budget: Budget = UNLIMITED,
) -> tuple[Tensor, float]:
    """Return the inputs after one step at every weight of a fading, and their ‖r‖².

    Conjugate gradients in single precision solve a step's linear system. They fit the strong
    directions first, and those that the prior prefers. So ending them early regularises. After a
    slow step, the largest eigenvalues of the next step's matrix are approximated. A preconditioner
    takes them out of that step's system and of the following ones, whose matrices differ little.

    Args:
        equations: the equations with the residuals r.
        inputs: (1, C, H, W) inputs of the start.
        fading: the weights and the settings of the steps.
        prior: the prior of the inputs, x = μ + L s.
        kept: the largest eigenvalues of an earlier step's matrix; see :func:`eigenvalues_kept`.
        budget: the fading ends with the step in which this is spent.

    Returns:
        The inputs x (1, C, H, W) at the end, and ‖r‖² there, with the blur of the last step.
    """
    narrow, narrow_prior = single(equations), prior.single()
    value = math.inf

    def pose(at: Iterate, weight: float) -> Posed:
        blur, here = fading.blur_at(weight), prior.inputs(at.point)

        def residual_at(point: Tensor) -> Tensor:
            return equations.residual(prior.inputs(point), blur)

        linear = narrow.linearise(here.float(), blur)
        found = kept.get(lambda: approximate(narrow, here, blur, narrow_prior))
        inverse = torch.clone if found is None else found.preconditioner(weight)
        return Posterior(
            *(linear, narrow_prior, torch.ones(1).double(), residual_at(at.point), at.point),
            residual_at,
            weight,
        ).posed(Solver(fading.iterations, precondition=inverse))

    def ends(at: Iterate, weight: float) -> bool:
        nonlocal value
        kept.note(at.iterations)
        value = at.value - weight * float(at.point.square().sum())
        return not value > fading.enough or budget.is_spent

    end = follow(fading.weights, pose, prior.coordinates(inputs), ends)
    return prior.inputs(end.point), value


def eigenvalues_kept(many: int = 100, served: int = 1000) -> Kept[LowRank]:
    """Return the place of the eigenvalues that serve several steps, empty before a slow step.

    Args:
        many: number of iterations of conjugate gradients above which a step counts as slow.
        served: number of iterations that the eigenvalues serve at least. They cost about half as
            many; see :func:`approximate`.
    """
    return Kept(many, served, is_due=False)


def approximate(
    equations: MaskEquations, inputs: Tensor, blur: float, prior: ImagePrior, rank: int = 500
) -> LowRank:
    """Return the largest eigenvalues of LᵀJᵀJL, approximated from some of its columns.

    These are the columns of the coordinates with the largest deviations under the prior. A column
    costs as much as an iteration of conjugate gradients.

    Args:
        equations: the equations in single precision, whose residuals have the derivative J by x.
        inputs: x (1, C, H, W).
        blur: the blur of the residuals.
        prior: the prior x = μ + L s, in single precision.
        rank: the number of columns; all are taken if the matrix has fewer.
    """
    smoothest = prior.deviations.flatten().argsort(descending=True)[:rank]
    units = torch.zeros(len(smoothest), inputs.numel())
    units[torch.arange(len(units)), smoothest] = 1
    images = prior.push(units.reshape(-1, *inputs.shape[1:]))
    columns = prior.pull(normal_products(equations, inputs, images, blur))
    return LowRank.from_columns(columns.flatten(1), smoothest)


def normal_products(
    equations: MaskEquations, inputs: Tensor, directions: Tensor, blur: float = 0.0, block: int = 32
) -> Tensor:
    """Return JᵀJ d (M, C, H, W) for directions d (M, C, H, W), in single precision.

    Args:
        equations: the equations in single precision, whose residuals have the derivative J by x.
        inputs: x (1, C, H, W).
        directions: the directions.
        blur: the blur of the residuals.
        block: number of products that are computed at once.
    """
    size, width = len(directions), min(block, len(directions))
    here = equations.linearise(inputs.float(), blur, width)
    found = torch.empty_like(directions)
    for first in [*range(0, size - width, width), size - width]:
        part = slice(first, first + width)
        found[part] = here.pull(here.push(directions[part]))
    return found
