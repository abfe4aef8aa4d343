"""The repair of signs of preactivations that lie nearer to zero than the input's own error.

An input that is right to 1e-6 still has one preactivation of millions within 1e-6 of zero. If its
sign is wrong, the gradient misses the observed one by far more than the input's error explains: on
a ResNet-18 by 1e-6 to 1e-4 of its square. Other inputs within that error have either sign by
chance. One of them whose gradient meets the observed one is as near to the truth, and its gradient
shows that its signs are right.
"""

from collections.abc import Sequence

import torch

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch


def settle_signs(
    problem: Problem,
    batch: Batch,
    errors: Sequence[float],
    met: float,
    draws: int,
    generator: torch.Generator,
    budget: Budget,
) -> tuple[Batch, float]:
    """Return, among inputs near the one found, the input whose gradient meets the observed best.

    Args:
        problem: the network and the observed gradient.
        batch: the input found.
        errors: sizes that its error may have, as shares of its root mean square. The draws use them
            in turn.
        met: relative squared distance of gradients at which the draws end.
        draws: largest number of draws; each one computes a gradient.
        generator: draws the inputs.
        budget: CPU seconds, after which no further input is drawn.

    Returns:
        The samples, and the relative squared distance of their gradient from the observed one.
    """
    best, least = batch, gradient_distance(problem, batch)
    scale = batch.inputs.square().mean().sqrt()
    for draw in range(draws):
        if least <= met or budget.is_spent:
            break
        noise = torch.randn(batch.inputs.shape, generator=generator).to(batch.inputs)
        inputs = batch.inputs + errors[draw % len(errors)] * scale * noise
        tried = Batch(inputs, batch.targets)
        distance = gradient_distance(problem, tried)
        if distance < least:
            best, least = tried, distance
    return best, least
