"""The objective that is the angle between the candidate's gradient and the observed one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.objectives.cosine import inner_product
from flwr_leakage.params import Params


def angle(inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
    """Return ``arccos(⟨g, g*⟩ / (‖g‖ ‖g*‖)) / π`` in [0, 1], entry by entry.

    Its derivative keeps its size near the solution, while that of the cosine vanishes. Angles
    within 1e-3 of a multiple of π have the derivative at that limit, as arccos' own is infinite.

    Args:
        inner: ⟨g, g*⟩ of the candidate's gradient g and the observed gradient g*, of any shape.
        squared: ‖g‖², of the same shape.
        observed_squared: ‖g*‖², of the same shape.

    Example:
        >>> angle(torch.tensor(0.0), torch.tensor(4.0), torch.tensor(9.0))
        tensor(0.5000)
    """
    norms = squared * observed_squared
    tiny = 1e-30 if norms.element_size() < 8 else 1e-300
    cosine = inner / norms.clamp_min(tiny).sqrt()
    bound = 1 - 1e-6
    inside = torch.acos(cosine.clamp(-bound, bound))
    slope = -1 / math.sqrt(1 - bound**2)
    return (inside + slope * (cosine - cosine.clamp(-bound, bound))) / math.pi


@dataclass(frozen=True)
class Angular:
    """The angle between gradients as a share of π, which ignores length as the cosine does."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        return self.of_products(
            inner_product(candidate, observed),
            inner_product(candidate, candidate),
            inner_product(observed, observed),
        )

    def of_products(self, inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
        """Return the distances (A,) of A candidates; see :class:`.base.ProductObjective`."""
        return angle(inner, squared, observed_squared)
