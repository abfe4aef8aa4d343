"""The fit of an input to known features of a ReLU network, with a preference for smooth images."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Fit:
    """The end of a fit, with the cost of it and of the fits before it.

    Attributes:
        inputs: (1, C, H, W) the fitted input in model space.
        value: the minimised function at this input.
        iterations: steps of the optimizer, summed over these fits.
        evaluations: computations of the function and its gradient, summed over these fits.
    """

    inputs: Tensor
    value: float
    iterations: int = 0
    evaluations: int = 0


def fit_features(
    problem: Problem,
    features: Features,
    start: Fit,
    weight: float,
    optimizer: LBFGS,
    budget: Budget = UNLIMITED,
) -> Fit:
    """Return the fit of an input to known features and to equations about features.

    It minimises the weighted sum of the outputs' :func:`feature_distance` and the equations'
    :func:`equation_distance`.

    Args:
        problem: holds the network.
        features: the known features and equations.
        start: the fit to continue from.
        weight: weight of the input's smoothed total variation beside that sum, ≥ 0.
        optimizer: minimises over all entries of the input at once.
        budget: CPU seconds, after which the fit ends early.
    """
    shape, deepest = start.inputs.shape, max([*features.outputs, *features.equations])

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs = points.reshape(shape).detach().requires_grad_()
        walk = ReluWalk(problem, inputs, last=deepest, pooled=features.windows)
        distances = [
            features.weight(number) * feature_distance(walk.compared(number), known)
            for number, known in features.outputs.items()
        ]
        distances += [
            equation_distance(walk.compared(number), known)
            for number, known in features.equations.items()
        ]
        value = torch.stack(distances).sum()
        if weight:
            value = value + weight * smooth_variation(inputs)
        (gradient,) = torch.autograd.grad(value, inputs)
        return value.detach().reshape(1), gradient.reshape(1, -1)

    def project(points: Tensor) -> Tensor:
        return problem.spec.clamp(points.reshape(shape)).reshape(1, -1)

    found = optimizer(evaluate, start.inputs.reshape(1, -1), project, budget=budget)
    return Fit(
        found.points.reshape(shape),
        float(found.values[0]),
        start.iterations + int(found.iterations[0]),
        start.evaluations + int(found.evaluations[0]),
    )


def feature_distance(preactivations: Tensor, known: Tensor) -> Tensor:
    """Return the squared distance of preactivations from known ReLU outputs, over ``‖known‖²``.

    A positive output equals the preactivation. A zero output only means that the preactivation is
    not positive, so that its positive part counts there.
    """
    residual = torch.where(known > 0, preactivations - known, preactivations.clamp_min(0))
    return residual.square().sum() / known.square().sum()


def equation_distance(preactivations: Tensor, known: Whitened) -> Tensor:
    """Return the squared residual of ReLU outputs in known equations, over ``‖values‖²``.

    Args:
        preactivations: inputs (1, C, H, W) of the ReLU.
        known: the equations about its outputs.
    """
    residual = known.residual(preactivations.clamp_min(0))
    return residual.square().sum() / known.values.square().sum()


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Return the total variation of images (B, C, H, W), with |d| replaced by √(d² + kink²)."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )
