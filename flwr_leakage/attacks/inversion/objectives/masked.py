"""Any objective, on the entries that survived pruning."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.inversion.objectives.base import Objective
from flwr_leakage.params import Params


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
