"""Signs of pre-activations that lie nearer to zero than an input's own error.

An input that is right to 1e-6 still has one pre-activation of millions within 1e-6 of zero. If its
sign is wrong, the gradient misses the observed one by far more than the input's error explains: on
a ResNet-18 by 1e-6 to 1e-4 of its square. Inputs that differ by no more than that error take the
sign by chance. One whose gradient meets the observed one is as near to the truth, and can be told
from a wrong one.
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
    """Of inputs within their own error, the one whose gradient is nearest to the observed one.

    Args:
        problem: whose gradient is to be met.
        batch: the input found.
        errors: sizes that its error may have, in units of its root mean square; draws take turns.
        met: the relative squared distance of gradients at which no further one is drawn.
        draws: most of them, one gradient each.
        generator: draws them.
        budget: ends it earlier once it is spent.

    Returns:
        the samples and the relative squared distance of their gradient.
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
