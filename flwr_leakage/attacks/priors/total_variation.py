"""Total variation: natural images are piecewise smooth."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.priors.base import PriorContext


def total_variation(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Mean absolute difference of neighbouring pixels: mean over vertical plus over horizontal.

    The anisotropic total variation of Rudin, Osher and Fatemi (1992), with the mean of Geiping
    et al.'s code, so that its weight is free of the image's size.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor(1.)
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return vertical + horizontal


@dataclass(frozen=True)
class TotalVariation:
    """``weight ·`` total variation of the candidate.

    Attributes:
        weight: relative to the objective, ≥ 0.
    """

    weight: float

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """The penalty of a candidate batch in model space, a scalar."""
        return self.weight * total_variation(inputs)
