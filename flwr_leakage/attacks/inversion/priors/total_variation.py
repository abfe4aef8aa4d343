"""Total variation as a prior: natural images are piecewise smooth."""

from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.inversion.priors.base import PriorContext


def total_variation(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Return the mean absolute difference of vertical neighbours plus that of horizontal ones.

    This is the anisotropic total variation of Rudin, Osher and Fatemi (1992), with the mean of
    Geiping et al.'s code, so that its weight does not depend on the image's size.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor(1.)
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return vertical + horizontal


def colour_differences(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
    """Return the C channels and the differences of every two of them.

    These are the double opponents of Åström and Schnörr (2016). Edges of natural images show in all
    channels at once, so that differences of channels vary less than the channels.
    """
    pairs = [images[:, i] - images[:, j] for i, j in combinations(range(images.shape[1]), 2)]
    return torch.cat([images, *(pair[:, None] for pair in pairs)], dim=1)


@dataclass(frozen=True)
class TotalVariation:
    """``weight ·`` total variation of the candidate.

    Attributes:
        weight: weight relative to the objective, ≥ 0.
        absolute: whether |x| is penalised instead of x, for InstaHide's images, whose signs are
            flipped at random (Huang et al. 2021's published code).
        colour: whether the differences of channels are penalised as well.
    """

    weight: float
    absolute: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """Return the penalty of a candidate batch in model space, a scalar."""
        images = inputs.abs() if self.absolute else inputs
        return self.weight * total_variation(colour_differences(images) if self.colour else images)
