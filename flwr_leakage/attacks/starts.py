"""Draw the inputs at which an attack starts."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.records import InputSpec


@runtime_checkable
class Initialisation(Protocol):
    """A function that draws the inputs at which an attack starts."""

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Tensor:
        """Return start inputs (B, C, H, W), normalised as the network takes them, for B samples.

        ``restart`` is the number of the start, from 0, if an update is attacked from several.
        """
        ...


@dataclass(frozen=True)
class Grey:
    """A start at mid-grey pixels, with normal noise if several starts would otherwise be equal.

    The first start of a single sample is plain grey. Samples of a batch, and further starts of the
    same attack, get noise, as they would move alike from the same point.

    Attributes:
        noise_std: standard deviation of the noise in pixel units, ≥ 0.
    """

    noise_std: float = 0.1

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Return B grey images (B, C, H, W), normalised as the network takes them.

        Noise is added if ``restart`` is not 0 or B is not 1, and pixels are clamped to [0, 1].
        """
        pixels = torch.full((num_samples, *spec.shape), 0.5)
        if restart > 0 or num_samples > 1:
            noise = torch.randn(pixels.shape, generator=generator)
            pixels = (pixels + self.noise_std * noise).clamp(0, 1)
        return spec.normalize(pixels)


@dataclass(frozen=True)
class Normal:
    """A start at normal noise of mean 0 in normalised inputs, as in DLG and Inverting Gradients.

    Attributes:
        std: standard deviation in units of the normalised input, ≥ 0; with 0 every pixel starts at
            the mean colour of the data.
    """

    std: float = 1.0

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Return noise (B, C, H, W) in the units of normalised inputs; ``restart`` is not used."""
        return self.std * torch.randn(num_samples, *spec.shape, generator=generator)
