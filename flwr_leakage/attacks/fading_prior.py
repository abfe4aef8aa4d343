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
from typing import NamedTuple

import torch
from torch import Tensor

from flwr_leakage.attacks.image_prior import ImagePrior
from flwr_leakage.attacks.mask_equations import Gates, MaskEquations, conjugate_gradients

INEXACT = 3e-2
"""Relative residual of the systems that are solved for a step."""

SHORTENINGS = 5
"""Trials of a step, each shorter than the one before."""

WIDEST_AT = 100.0
"""Weight of the prior at which the blur has its full width; it goes with the fourth root."""

SHARP = 10.0
"""ReLUs are exact once the weight is below this multiple of the last one."""


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


def fade(
    equations: MaskEquations, prior: ImagePrior, coordinates: Tensor, fading: Fading
) -> tuple[Tensor, float]:
    """Coordinates s (C, H, W) after one step at every weight, and ‖r‖² there.

    Steps are solved by conjugate gradients in s and in single precision. They see strong
    directions first, and those that the prior prefers, so that ending them early regularises.

    Args:
        equations: r.
        prior: of x.
        coordinates: where to start.
        fading: the weights.
    """
    single, single_prior = equations.single(), prior.single()
    weight, value = fading.first, math.inf
    while weight > fading.last and value > fading.enough:
        exact = fading.sharpens and weight <= SHARP * fading.last
        blur = 0.0 if exact else fading.blur * (weight / WIDEST_AT) ** 0.25
        inputs = prior.inputs(coordinates)
        residual, gates = equations.residual(inputs, blur)
        slope = prior.pull(equations.pull_back(gates, inputs.shape)(residual)[0])
        slope = slope + weight * coordinates
        step = _step(single, single_prior, gates, slope, weight, fading.iterations)
        value = float(residual.square().sum())
        objective = value + weight * float(coordinates.square().sum())
        length = 1.0
        for _ in range(SHORTENINGS):
            trial = coordinates + length * step
            found = equations.sum_of_squares(prior.inputs(trial), blur)
            if found + weight * float(trial.square().sum()) < objective:
                coordinates, value = trial, found
                break
            length *= 0.4
        weight *= fading.factor
    return coordinates, value


def _step(
    equations: MaskEquations,
    prior: ImagePrior,
    gates: Gates,
    slope: Tensor,
    weight: float,
    iterations: int,
) -> Tensor:
    """Return −(LᵀJᵀJL + αI)⁻¹ slope, in single precision as the equations and the prior are."""
    few = tuple(gate.float() for gate in gates)
    pull = equations.pull_back(few, torch.Size((1, *slope.shape)))

    def product(vector: Tensor) -> Tensor:
        change = prior.push(vector.reshape(slope.shape))[None]
        image = prior.pull(pull(equations.linear(few, change))[0])
        return image.flatten() + weight * vector

    step = conjugate_gradients(product, -slope.flatten().float(), INEXACT, iterations)[0]
    return step.to(slope.dtype).reshape(slope.shape)
