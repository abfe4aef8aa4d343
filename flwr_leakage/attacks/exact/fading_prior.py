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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.mask_equations import Gates, MaskEquations, conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.low_rank import LowRank

INEXACT = 3e-2
"""Relative residual of the systems that are solved for a step."""

SHORTENINGS = 5
"""Trials of a step, each shorter than the one before."""

WIDEST_AT = 100.0
"""Weight of the prior at which the blur has its full width; it goes with the fourth root."""

SHARP = 10.0
"""ReLUs are exact once the weight is below this multiple of the last one."""


RANK = 500
"""Columns of the matrix that its largest eigenvalues are taken from."""

BLOCK = 32
"""Columns that are computed at once."""

MANY_ITERATIONS = 100
"""Of conjugate gradients: from there on a preconditioner is worth its columns."""

PATIENCE = 2
"""Iterations per column before another one replaces it: a column costs as much as an iteration."""


class Fading(NamedTuple):
    """Weights of the prior in successive steps.

    Attributes:
        first: weight α of the first step.
        last: of the last one.
        factor: from one to the next.
        blur: standard deviation of the noise in the ReLUs' layers' inputs, at α = 100.
        iterations: of conjugate gradients in a step, at most.
        sharpens: whether the last steps have no blur.
        enough: ‖r‖² at which to end.
    """

    first: float
    last: float
    factor: float
    blur: float
    iterations: int
    sharpens: bool = False
    enough: float = 0.0


class Solver:
    """Solves the systems of successive steps by conjugate gradients, in single precision.

    They see strong directions first, and those that the prior prefers, so that ending them early
    regularises. Once they take long, the largest eigenvalues of a step's matrix are taken out of
    this one's and the next ones' by a preconditioner, while that helps.
    """

    def __init__(self, prior: ImagePrior) -> None:
        """Take the prior of x."""
        self.prior = prior
        self._single = prior.single()
        self._smoothest = prior.deviations.flatten().argsort(descending=True)[:RANK]
        self._low_rank: LowRank | None = None
        self._is_slow = False
        self._spent = PATIENCE * RANK

    def step(
        self, equations: MaskEquations, gates: Gates, slope: Tensor, weight: float, iterations: int
    ) -> Tensor:
        """Return −(LᵀJᵀJL + αI)⁻¹ slope.

        Args:
            equations: in single precision.
            gates: where J is taken.
            slope: (C, H, W).
            weight: α.
            iterations: at most.
        """
        gates = tuple(gate.float() for gate in gates)
        if self._is_slow:
            self._spent = 0
            self._low_rank = self._approximate(equations, gates, slope.shape)
        product = self._matrix(equations, gates, (1, *slope.shape))
        keep = self._low_rank.preconditioner(weight) if self._low_rank else torch.clone
        step, taken = conjugate_gradients(
            lambda vector: product(vector.reshape(1, *slope.shape)).flatten() + weight * vector,
            -slope.flatten().float(),
            INEXACT,
            iterations,
            keep,
        )
        self._spent += taken
        self._is_slow = taken > MANY_ITERATIONS and self._spent > PATIENCE * RANK
        return step.to(slope.dtype).reshape(slope.shape)

    def _matrix(
        self, equations: MaskEquations, gates: Gates, shape: tuple[int, ...]
    ) -> Callable[[Tensor], Tensor]:
        """LᵀJᵀJL, for batches (B, C, H, W)."""
        pull = equations.pull_back(gates, torch.Size(shape))
        prior = self._single
        return lambda batch: prior.pull(pull(equations.linear(gates, prior.push(batch))))

    def _approximate(
        self, equations: MaskEquations, gates: Gates, shape: tuple[int, ...]
    ) -> LowRank:
        """From the columns of the smoothest coordinates, where the prior varies most."""
        units = torch.zeros(len(self._smoothest), math.prod(shape))
        units[torch.arange(len(units)), self._smoothest] = 1
        columns = [
            self._matrix(equations, gates, (len(block), *shape))(block.reshape(-1, *shape))
            for block in units.split(BLOCK)
        ]
        return LowRank.of(torch.cat(columns).flatten(1), self._smoothest)


def fade(
    equations: MaskEquations, inputs: Tensor, fading: Fading, solver: Solver
) -> tuple[Tensor, float]:
    """Inputs (1, C, H, W) after one step at every weight, and ‖r‖² there.

    Args:
        equations: r.
        inputs: where to start.
        fading: the weights.
        solver: of the steps' systems.
    """
    prior, single = solver.prior, equations.single()
    coordinates = prior.coordinates(inputs)
    weight, value = fading.first, math.inf
    while weight > fading.last and value > fading.enough:
        exact = fading.sharpens and weight <= SHARP * fading.last
        blur = 0.0 if exact else fading.blur * (weight / WIDEST_AT) ** 0.25
        residual, gates = equations.residual(inputs, blur)
        slope = prior.pull(equations.pull_back(gates, inputs.shape)(residual)[0])
        slope = slope + weight * coordinates
        step = solver.step(single, gates, slope, weight, fading.iterations)
        value = float(residual.square().sum())
        objective = value + weight * float(coordinates.square().sum())
        length = 1.0
        for _ in range(SHORTENINGS):
            trial = coordinates + length * step
            found = equations.sum_of_squares(prior.inputs(trial), blur)
            if found + weight * float(trial.square().sum()) < objective:
                coordinates, inputs, value = trial, prior.inputs(trial), found
                break
            length *= 0.4
        weight *= fading.factor
    return inputs, value
