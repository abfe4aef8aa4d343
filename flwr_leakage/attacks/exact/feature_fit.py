"""The fit of an input to known features of a ReLU network, with a preference for smooth images."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Fit:
    """Where a fit ended, and what it and those before it cost.

    Attributes:
        inputs: (1, C, H, W).
        value: what was minimised, there.
        iterations: of the optimizer.
        evaluations: of the value and its gradient.
    """

    inputs: Tensor
    value: float
    iterations: int = 0
    evaluations: int = 0


def fit_features(
    problem: Problem, features: Features, start: Fit, weight: float, optimizer: LBFGS
) -> Fit:
    """Fit the input to features by their summed distances, see :func:`feature_distance`.

    Args:
        problem: has the network.
        features: those known.
        start: the fit to go on from.
        weight: of the images' smoothed total variation.
        optimizer: of all entries at once.
    """
    shape, deepest = start.inputs.shape, max(features.outputs)

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs = points.reshape(shape).detach().requires_grad_()
        walk = ReluWalk({}, last=deepest, pooled=features.windows)
        walk.run(problem, inputs)
        distances = [
            feature_distance(walk.compared(number), known)
            for number, known in features.outputs.items()
        ]
        value = torch.stack(distances).sum()
        if weight:
            value = value + weight * smooth_variation(inputs)
        (gradient,) = torch.autograd.grad(value, inputs)
        return value.detach().reshape(1), gradient.reshape(1, -1)

    def project(points: Tensor) -> Tensor:
        return problem.spec.clamp(points.reshape(shape)).reshape(1, -1)

    found = optimizer(evaluate, start.inputs.reshape(1, -1), project)
    return Fit(
        found.points.reshape(shape),
        float(found.values[0]),
        start.iterations + int(found.iterations[0]),
        start.evaluations + int(found.evaluations[0]),
    )


def feature_distance(preactivations: Tensor, known: Tensor) -> Tensor:
    """Squared distance from known ReLU outputs, as a share of theirs.

    Where the output is positive it tells the preactivation; elsewhere only that this is ≤ 0.
    """
    residual = torch.where(known > 0, preactivations - known, preactivations.clamp_min(0))
    return residual.square().sum() / known.square().sum()


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Total variation of images (B, C, H, W), with |d| replaced by √(d² + kink²)."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )
