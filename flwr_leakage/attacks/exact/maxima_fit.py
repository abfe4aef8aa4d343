"""The fit of an input to the maxima of overlapping windows, as the stems of real networks have.

A stem of a convolution, a ReLU and max pooling over 3×3 windows of stride 2 keeps few more numbers
than the image has pixels: 16,384 for the 12,288 of a 64×64 image in a ResNet-18. Which entry of its
window each number was is not told. With these choices given, the numbers are linear in the image.
So a Gauss–Newton step takes the choices of the last image, and a prior of natural images, which
fades from step to step, keeps early images smooth, where neighbouring entries are nearly equal.

On an untrained ResNet-18 four of five choices are then right, and the image is near 30 dB; with all
of them right it would be above 50.
"""

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.feature_fit import Fit, feature_residual
from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior

FIRST, FADE, STEPS = 2e-3, 0.6, 26
"""Weight of the prior in the first step, its ratio from step to step, and number of steps. The
features have the length one."""

ITERATIONS, TOLERANCE = 60, 1e-3
"""Largest number of iterations of conjugate gradients in a step, and their relative residual."""


def fit_maxima(problem: Problem, features: Features, budget: Budget) -> Fit:
    """Return the fit of an input to the shallowest of the known features, from grey.

    Args:
        problem: holds the network, in single precision.
        features: the known features, of which the shallowest are pooled.
        budget: CPU seconds, after which the fit ends early.
    """
    number = features.shallowest
    known = features.outputs[number].float()
    prior = ImagePrior.natural(problem.spec).single()

    def residual(inputs: Tensor) -> Tensor:
        walk = ReluWalk(problem, inputs, last=number, pooled=features.windows)
        return feature_residual(walk.compared(number), known).flatten() / known.norm()

    evaluations = 0

    def pose(at: Iterate) -> Posed | None:
        nonlocal evaluations
        if at.steps >= STEPS or budget.is_spent:
            return None
        linear = Linearization(residual, prior.inputs(at.point))
        evaluations += 1
        return Posterior(
            linear,
            prior,
            torch.ones_like(linear.value),
            linear.value,
            at.point,
            lambda point: residual(prior.inputs(point)),
            FIRST * FADE**at.steps,
        ).posed(Solver(ITERATIONS, TOLERANCE, budget=budget))

    end = descend(pose, torch.zeros_like(prior.grey), Shortening())
    inputs = problem.spec.clamp(prior.inputs(end.point))
    return Fit(inputs, float(residual(inputs).square().sum()), end.steps, evaluations)
