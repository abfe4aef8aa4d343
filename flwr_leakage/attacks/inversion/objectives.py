"""Objectives: distances of a candidate's gradient from the observed one.

Each is a frozen object that takes both gradients by parameter name, and is smallest if they agree.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
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
class Tag:
    """``‖g − g*‖² / ‖g*‖² + l1_weight · ‖g − g*‖₁ / ‖g*‖₁``, the objective of TAG.

    g is the candidate's gradient and g* the observed one (Deng et al. 2021, eq. 4, with both terms
    made scale-free). For the paper's weights, which are larger for layers nearer to the input, wrap
    it in ``LayerWeighted``.

    Attributes:
        l1_weight: the paper's α, ≥ 0.
    """

    l1_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.l1_weight < 0:
            raise ValueError(f"l1_weight must be ≥ 0, got {self.l1_weight}.")

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        gaps = [(candidate[k] - observed[k]).abs().sum() for k in observed]
        sizes = [value.abs().sum() for value in observed.values()]
        absolute = sum(gaps[1:], start=gaps[0]) / sum(sizes[1:], start=sizes[0])
        return relative_squared_distance(candidate, observed) + self.l1_weight * absolute


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


@dataclass(frozen=True)
class LayerWeighted:
    """``objective(w ∘ g, w ∘ g*)`` with one factor w_l for all gradients of layer l.

    A layer is a module with parameters of its own; layers 1 … L are counted from the input.

    =============  ==========================  ==================================================
    scheme         w_l                         source
    =============  ==========================  ==================================================
    linear         (L − l + 1) / L             Geiping et al. 2020's published code
    exponential    e^(1 − l)                   Geiping et al. 2020's published code
    balanced       1 / ‖g*_l‖                  equal weight of layers with any size of gradient
    =============  ==========================  ==================================================

    Attributes:
        objective: the distance of the weighted gradients.
        scheme: a row of the table.
    """

    objective: Objective
    scheme: Literal["linear", "exponential", "balanced"] = "linear"

    def __post_init__(self) -> None:
        if self.scheme not in ("linear", "exponential", "balanced"):
            raise ValueError(
                f"scheme must be 'linear', 'exponential' or 'balanced', got {self.scheme!r}."
            )

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        layers: dict[str, list[str]] = {}
        for name in observed:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        left, right = {}, {}
        for index, names in enumerate(layers.values()):
            weight = self._weight(index, len(layers), [observed[name] for name in names])
            for name in names:
                left[name], right[name] = weight * candidate[name], weight * observed[name]
        return self.objective(left, right)

    def _weight(self, index: int, count: int, observed: list[Tensor]) -> Tensor | float:
        if self.scheme == "linear":
            return (count - index) / count
        if self.scheme == "exponential":
            return math.exp(-index)
        norm = torch.stack([value.square().sum() for value in observed]).sum().sqrt()
        # A layer whose observed gradient is zero keeps its scale.
        return 1 / torch.where(norm > 0, norm, 1.0)
