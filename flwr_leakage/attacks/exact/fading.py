"""Gauss–Newton through ReLUs, with a prior of images and a blur of the ReLUs that fade together.

An inactive ReLU has no slope, so Gauss–Newton from far away ends in the nearest local minimum.
Here every step minimises, to first order,

    ‖r(x)‖² + α ‖s‖²,   x = μ + L s,

where r are the residuals of the equations, and s is standard normal under the prior (iteratively
regularised Gauss–Newton, Bakushinskii 1992). In r every ReLU is averaged over Gaussian noise, the
*blur*. The weight α falls from step to step, and the width of the noise falls with it.

While α is large, the images stay smooth, and only what most of the equations agree on is fitted.
The noise gives a slope to units that are nearly active.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.fading_solver import FadingSolver
from flwr_leakage.attacks.exact.mask_equations import LinearisedMasks, MaskEquations


@dataclass(frozen=True)
class Fading:
    """The weights α of the prior in successive steps, and the settings of these steps.

    Attributes:
        first: α of the first step, > last.
        last: the fading ends once α is no longer above this, > 0.
        factor: α is multiplied by this after each step, in (0, 1).
        blur: standard deviation of the noise at α = ``widest_at``, ≥ 0. The noise is in the inputs
            of the layers with ReLUs, and is proportional to the fourth root of α.
        iterations: most iterations of conjugate gradients in a step, ≥ 1.
        sharpens: whether the last steps go without a blur.
        enough: the fading also ends once ‖r‖² is at most this, ≥ 0.
        widest_at: the α at which the noise has the standard deviation ``blur``, > 0.
        sharp: if ``sharpens``, the blur is zero once α is at most this multiple of ``last``, ≥ 0.
        trials: how many lengths of a step are tried, ≥ 1. The first that lowers the objective is
            taken; if none does, the input stays where it is.
        shortening: each length is this fraction of the one before, in (0, 1).
    """

    first: float
    last: float
    factor: float
    blur: float
    iterations: int
    sharpens: bool = False
    enough: float = 0.0
    widest_at: float = 100.0
    sharp: float = 10.0
    trials: int = 5
    shortening: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.last < self.first:
            raise ValueError(
                f"first and last must be weights with 0 < last < first, got {self.first} and "
                f"{self.last}."
            )
        for name in ("factor", "shortening"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in (0, 1), got {getattr(self, name)}.")
        for name in ("blur", "enough", "sharp"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in ("iterations", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.widest_at > 0:
            raise ValueError(f"widest_at must be above 0, got {self.widest_at}.")

    def blur_at(self, weight: float) -> float:
        """Standard deviation of the noise at a weight α of the prior."""
        if self.sharpens and weight <= self.sharp * self.last:
            return 0.0
        return self.blur * (weight / self.widest_at) ** 0.25


@dataclass(frozen=True)
class Faded:
    """Where a fading ended.

    Attributes:
        inputs: x (1, C, H, W).
        value: ‖r‖² there, with the blur of the last step.
        solver: the solver for the next step, which knows what this fading learned.
    """

    inputs: Tensor
    value: float
    solver: FadingSolver


def fade(
    equations: MaskEquations,
    inputs: Tensor,
    fading: Fading,
    solver: FadingSolver,
    budget: Budget = UNLIMITED,
) -> Faded:
    """Take one step at every weight of a fading.

    Args:
        equations: the equations with the residuals r.
        inputs: where to start, (1, C, H, W).
        fading: the weights and the settings of the steps.
        solver: solves the linear systems of the steps, and holds the prior.
        budget: there is no further step once it is spent.
    """
    prior, single = solver.prior, equations.single()
    coordinates = prior.coordinates(inputs)
    weight, value = fading.first, math.inf
    while weight > fading.last and value > fading.enough:
        blur = fading.blur_at(weight)
        residual, system = equations.linearise(inputs, blur)
        slope = prior.pull(system.pull_back()(residual)[0]) + weight * coordinates
        system = LinearisedMasks(single, system.gates.single(), system.shape)
        step, solver = solver.step(system, slope, weight, fading.iterations)
        value = float(residual.square().sum())
        objective = value + weight * float(coordinates.square().sum())
        length = 1.0
        for _ in range(fading.trials):
            trial = coordinates + length * step
            found = equations.sum_of_squares(prior.inputs(trial), blur)
            if found + weight * float(trial.square().sum()) < objective:
                coordinates, inputs, value = trial, prior.inputs(trial), found
                break
            length *= fading.shortening
        weight *= fading.factor
        if budget.is_spent:
            break
    return Faded(inputs, value, solver)
