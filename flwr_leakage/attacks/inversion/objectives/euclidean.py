"""Squared Euclidean distance of gradients."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.distance import relative_squared_distance, squared_distance
from flwr_leakage.params import Params


@dataclass(frozen=True)
class Euclidean:
    """The objective of DLG and iDLG, made scale-free: ``scale · ‖g − g*‖² / ‖g*‖²``.

    The division by the observed norm changes no minimum, and makes tolerances and the weights of
    priors comparable over models. The papers' own objective is not divided.

    Attributes:
        scale: factor of the objective, > 0.
        relative: whether to divide by ‖g*‖².
    """

    scale: float = 1.0
    relative: bool = True

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        distance = relative_squared_distance if self.relative else squared_distance
        return self.scale * distance(candidate, observed)
