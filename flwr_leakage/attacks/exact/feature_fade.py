"""Fit an input to known ReLU outputs by Gauss–Newton, with a prior and a blur that fall together.

From grey, a fit of an input to features behind several ReLUs gets stuck, as units that are off have
no slope. Here, every ReLU is averaged over noise, the *blur*, and the input has a normal prior of
images, x = μ + L s with s ~ N(0, I) (iteratively regularised Gauss–Newton, Bakushinskii 1992). Each
step minimises ``‖r‖² + ρ ‖s‖²`` to first order, where r are the relative distances of the outputs
from the known ones. The weight ρ of the prior falls from step to step, and the blur with it, so
that early steps keep images smooth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.network.blur import blurred_relu
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.descent import Iterate, Posed, follow
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver, largest_eigenvalue
from flwr_leakage.spectral.image_prior import ImagePrior

FACTOR, STEPS = 0.5, 32
"""Ratio of the prior's weight in a step to that before, and the largest number of steps.
With a blur of 1 and a factor of 0.25, a fit ended at 67 dB, and with 0.4 at 92 dB (ResNet-18 of
width 32, seed 13000)."""

BLUR, EXPONENT, LEAST_BLUR = 2.0, 0.4, 3e-3
"""Blur of the first step, in standard deviations that a channel's ReLU inputs have over images of
the prior; the power of the prior's weight to which it is proportional; and the blur that counts as
none. With a first blur of 1, the fit of a ResNet-18 of width 32 (seed 13005) stood at 19 dB after
eleven steps, and with 2 at 48 dB."""

ITERATIONS, SHARP_ITERATIONS = 60, 250
"""Largest number of iterations of conjugate gradients in a step with blur, and in one without."""

DRAWS = 16
"""Number of images that measure the ReLUs' inputs. From 16 a standard deviation has an error of
1/√32, 18 %."""


@dataclass(frozen=True)
class _Outputs:
    """The outputs of ReLUs as a function of the input, each divided by the norm of the known one.

    Attributes:
        problem: the network.
        features: the known outputs, none of them pooled.
        deviations: standard deviation (1, C, 1, 1) of each ReLU's inputs over images of the prior.
    """

    problem: Problem
    features: Features
    deviations: Sequence[Tensor]

    def __call__(self, inputs: Tensor, blur: float) -> list[Tensor]:
        """Return the outputs' differences from the known ones, over the norms of these."""
        widths = [blur * each.to(inputs) for each in self.deviations] if blur else []
        walk = ReluWalk(self.problem, inputs, last=max(self.features.outputs), widths=widths)
        found = []
        for number, known in self.features.outputs.items():
            inner = walk.preactivations[number]
            outputs = blurred_relu(inner, widths[number]) if blur else inner.clamp_min(0)
            weight = self.features.weight(number) ** 0.5 / known.norm()
            found.append((weight * (outputs - known.to(outputs))).flatten())
        return found

    def residual(self, inputs: Tensor, blur: float) -> Tensor:
        """Return the differences of a call as one tensor (P,)."""
        with torch.no_grad():
            return torch.cat(self(inputs, blur))


def fade_features(problem: Problem, features: Features, met: float, budget: Budget) -> Tensor:
    """Return the input (1, C, H, W) that Gauss–Newton with a falling prior and blur fits.

    Args:
        problem: the network, in double precision.
        features: the known outputs of ReLUs, none of them pooled.
        met: the fit ends at this sum of squared relative distances.
        budget: the CPU time, after which the fit ends early.
    """
    prior, narrow = ImagePrior.natural(problem.spec), problem.to(torch.float32)
    single = prior.single()
    draws = torch.randn(DRAWS, *problem.spec.shape, generator=torch.Generator().manual_seed(0))
    images = problem.spec.clamp(single.inputs(draws))
    with torch.no_grad():
        walk = ReluWalk(narrow, images, last=max(features.outputs))
    deviations = [each.std((0, 2, 3), keepdim=True) for each in walk.preactivations]
    precise = _Outputs(problem, features, deviations)
    rough = _Outputs(narrow, features, deviations)

    def posterior(point: Tensor, blur: float, weight: float) -> Posterior:
        linear = Linearization(partial(rough, blur=blur), prior.inputs(point).float())

        def residual(point: Tensor) -> Tensor:
            return precise.residual(prior.inputs(point), blur)

        one = torch.ones(1, dtype=torch.float64)
        return Posterior(linear, single, one, residual(point), point, residual, weight)

    def pose(at: Iterate, share: float) -> Posed:
        blur = BLUR * share**EXPONENT
        blur = blur if blur > LEAST_BLUR else 0.0
        iterations = ITERATIONS if blur else SHARP_ITERATIONS
        solver = Solver(iterations, 0.1, budget=budget)
        return posterior(at.point, blur, first * share).posed(solver)

    def ends(at: Iterate, _: float) -> bool:
        value = precise.residual(prior.inputs(at.point), 0.0).square().sum()
        return float(value) <= met or budget.is_spent

    start = torch.zeros(1, *problem.spec.shape, dtype=torch.float64)
    first = 0.1 * largest_eigenvalue(posterior(start, BLUR, 1.0), budget)
    end = follow([FACTOR**step for step in range(STEPS)], pose, start, ends)
    return prior.inputs(end.point)
