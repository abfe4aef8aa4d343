"""The fit of an input to features by Gauss–Newton, with a prior of natural images that fades.

It is for features from which the fit that :mod:`flwr_leakage.attacks.exact.feature_fit` starts at
grey gets stuck.

- *Maxima of overlapping windows*, as the stems of real networks have them. A convolution and max
  pooling over 3×3 windows of stride 2 keep few more numbers than the image has pixels: 16,384 for
  the 12,288 of a 64×64 image in a ResNet-18. Which entry of its window each number was is not told.
  With these choices given, the numbers are linear in the image. A step takes the choices of the
  last image. The prior keeps early images smooth, where neighbouring entries are nearly equal. On
  an untrained ResNet-18 four of five choices are then right, and the image is near 30 dB; with all
  of them right it is above 50.
- *Features behind BatchNorm in train mode*, where a grey image would be normalised by statistics
  that are far from its own. There ReLUs are blurred at first, too.
"""

from functools import partial

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

FIRST, FADE, STEPS = 2e-2, 0.6, 60
"""Weight of the prior in the first step, its ratio from step to step, and number of steps. The
features have the length one. The values were chosen on development draws; no table."""

LEAST = 26
"""Number of steps after which a step that does not lower the objective is the last one."""

BLUR, EXPONENT = 1.0, 0.4
"""Width of the blur of ReLUs in the first step, in units of their inputs' deviation, and the power
of the prior's weight that it is proportional to. They were chosen likewise."""

ITERATIONS, TOLERANCE = 60, 1e-3
"""Largest number of iterations of conjugate gradients in a step, and their relative residual."""


def fit_smoothly(problem: Problem, features: Features, budget: Budget) -> Fit:
    """Return the fit of an input to known features, from grey.

    Args:
        problem: holds the network, in single precision.
        features: the known features, without equations.
        budget: CPU seconds, after which the fit ends early.
    """
    outputs = {number: known.float() for number, known in features.outputs.items()}
    prior = ImagePrior.natural(problem.spec).single()

    def residual(inputs: Tensor, blur: float = 0.0) -> Tensor:
        walk = ReluWalk(problem, inputs, last=max(outputs), pooled=features.windows, blur=blur)
        found = [
            feature_residual(walk.compared(number), known).flatten() / known.norm()
            for number, known in outputs.items()
        ]
        return torch.cat(found)

    evaluations = 0

    def pose(at: Iterate) -> Posed | None:
        nonlocal evaluations
        if at.steps >= STEPS or budget.is_spent or (at.steps > LEAST and not at.has_moved):
            return None
        share = FADE**at.steps
        blurred = partial(residual, blur=BLUR * share**EXPONENT)
        linear = Linearization(blurred, prior.inputs(at.point))
        evaluations += 1
        return Posterior(
            linear,
            prior,
            torch.ones_like(linear.value),
            linear.value,
            at.point,
            lambda point: blurred(prior.inputs(point)),
            FIRST * share,
        ).posed(Solver(ITERATIONS, TOLERANCE, budget=budget))

    end = descend(pose, torch.zeros_like(prior.grey), Shortening())
    inputs = problem.spec.clamp(prior.inputs(end.point))
    return Fit(inputs, float(residual(inputs).square().sum()), end.steps, evaluations)
