"""Squared Euclidean distance of gradients."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.distance import relative_squared_distance
from flwr_leakage.params import Params


@dataclass(frozen=True)
class Euclidean:
    """The objective of DLG and iDLG, made scale-free: ``scale · ‖g − g*‖² / ‖g*‖²``.

    Dividing by the observed norm changes no minimum, and makes tolerances comparable over
    models.

    Attributes:
        scale: factor of the objective, > 0.
    """

    scale: float = 1.0

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Distance of the candidate's gradient from the observed one, a scalar."""
        return self.scale * relative_squared_distance(candidate, observed)
