"""Squared Euclidean distance of gradients."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.params import Params


def squared_distance(candidate: Params, observed: Params) -> Tensor:
    """``Σ_l ‖g_l − g*_l‖²`` over all entries l (Zhu, Liu, Han 2019, eq. 4)."""
    terms = [(candidate[k] - observed[k]).square().sum() for k in observed]
    return sum(terms[1:], start=terms[0])


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
        norm = sum((v.square().sum() for v in observed.values()), start=_zero(observed))
        return self.scale * squared_distance(candidate, observed) / norm


def _zero(like: Params) -> Tensor:
    return next(iter(like.values())).new_zeros(())
