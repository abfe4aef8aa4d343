"""Objectives: distances of a candidate's gradient from the observed one.

Each is a frozen object that takes both gradients by parameter name, and is smallest if they agree.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.attacks.distance import relative_squared_distance, squared_distance
from flwr_leakage.params import Params


@runtime_checkable
class Objective(Protocol):
    """A distance of a candidate's gradient from the observed one."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return a scalar, differentiable in the candidate's gradient, and smallest if both agree.

        Args:
            candidate: the candidate's gradient g, by parameter name.
            observed: the observed gradient g*, by the same names.
        """
        ...


def inner_product(left: Params, right: Params) -> Tensor:
    """Return ``Σ ⟨left_l, right_l⟩`` over all entries, a scalar."""
    terms = [(left[k] * right[k]).sum() for k in right]
    return sum(terms[1:], start=terms[0])


@dataclass(frozen=True)
class Cosine:
    """``1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖)`` in [0, 2], the objective of Inverting Gradients.

    It ignores the gradient's length (Geiping et al. 2020, eq. 4).
    """

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        inner = inner_product(candidate, observed)
        norms = inner_product(candidate, candidate) * inner_product(observed, observed)
        tiny = 1e-30 if norms.element_size() < 8 else 1e-300
        return 1 - inner / norms.clamp_min(tiny).sqrt()


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


@dataclass(frozen=True)
class Masked:
    """``objective(1[g* ≠ 0] ∘ g, g*)``, for an attacker who knows of pruning.

    Pruned entries of an update are exactly zero, which only shows that the sample's own gradient
    is small there. Entries that are zero without pruning (units that no sample activates) are also
    left out.

    Attributes:
        objective: the distance of the masked gradients.
    """

    objective: Objective

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        kept = {name: candidate[name] * (value != 0) for name, value in observed.items()}
        return self.objective(kept, observed)
