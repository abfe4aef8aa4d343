"""Gauss–Newton through ReLUs, with a prior of images and a blur of the ReLUs that fade together.

An inactive ReLU has no slope, so Gauss–Newton from far away ends in the nearest local minimum.
Here every step minimises, to first order,

    ‖r(x)‖² + α ‖s‖²,   x = μ + L s,

with s standard normal under the prior (iteratively regularised Gauss–Newton, Bakushinskii 1992),
and r has every ReLU averaged over Gaussian noise, whose width falls with α. While α is large only
what most of the equations agree on is fitted, in images that are smooth; the noise gives units
that are nearly active a slope.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.exact.fading_solver import FadingSolver
from flwr_leakage.attacks.exact.mask_equations import LinearisedMasks, MaskEquations


@dataclass(frozen=True)
class Fading:
    """Weights of the prior in successive steps, and what goes with them.

    Attributes:
        first: weight α of the first step, > last.
        last: steps have weights above this one, > 0.
        factor: from one weight to the next, in (0, 1).
        blur: standard deviation of the noise in the ReLUs' layers' inputs at the weight
            ``widest_at``, ≥ 0; it goes with the fourth root of the weight.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        sharpens: whether the last steps have no blur.
        enough: ‖r‖² at which to end, ≥ 0.
        widest_at: weight at which the blur has its full width, > 0.
        sharp: where it sharpens, ReLUs are exact once the weight is at most this multiple of the
            last one, ≥ 0.
        trials: of a step, each shorter than the one before, ≥ 1.
        shortening: from one trial's length to the next, in (0, 1).
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
        """Standard deviation of the noise at a weight of the prior."""
        if self.sharpens and weight <= self.sharp * self.last:
            return 0.0
        return self.blur * (weight / self.widest_at) ** 0.25


@dataclass(frozen=True)
class Faded:
    """Where a fading ended.

    Attributes:
        inputs: x (1, C, H, W).
        value: ‖r‖² there, with the blur of the last step.
        solver: as it is after the last step.
    """

    inputs: Tensor
    value: float
    solver: FadingSolver


def fade(equations: MaskEquations, inputs: Tensor, fading: Fading, solver: FadingSolver) -> Faded:
    """One step at every weight of a fading, from given inputs.

    Args:
        equations: r.
        inputs: where to start (1, C, H, W).
        fading: the weights.
        solver: of the steps' systems; it has the prior.
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
    return Faded(inputs, value, solver)
