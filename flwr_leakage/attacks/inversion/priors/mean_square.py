"""The mean square as a prior: a normalised input is rarely far from its mean."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.inversion.priors.base import PriorContext


@dataclass(frozen=True)
class MeanSquare:
    """``weight ·`` mean of x² over all entries, the L2 prior of Yin et al. 2021 (eq. 9).

    Attributes:
        weight: weight relative to the objective, ≥ 0.
    """

    weight: float

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """Return the penalty of a candidate batch in model space, a scalar."""
        return self.weight * inputs.square().mean()
