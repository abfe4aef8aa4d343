"""Any objective, with a weight for each layer."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.objectives.base import Objective
from flwr_leakage.params import Params


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
