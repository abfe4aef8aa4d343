"""Draw the first candidates of an attack."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.records import InputSpec


@runtime_checkable
class Initialisation(Protocol):
    """Draw an attack's first candidate."""

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Tensor:
        """Return inputs (B, C, H, W) in model space.

        Args:
            spec: shape (C, H, W) and normalisation of an input.
            num_samples: number B of samples.
            restart: number of the start of one target, counted from 0.
            generator: draws the random numbers.
        """
        ...


@dataclass(frozen=True)
class Grey:
    """Mid-grey pixels, with normal noise if several starts would otherwise be equal.

    The first start of a single sample is plain grey. Samples of a batch, and further restarts of a
    target, get noise, as they would move alike from the same point.

    Attributes:
        noise_std: standard deviation of the noise in pixel units, ≥ 0.
    """

    noise_std: float = 0.1

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Return inputs (B, C, H, W) in model space."""
        pixels = torch.full((num_samples, *spec.shape), 0.5)
        if restart > 0 or num_samples > 1:
            noise = torch.randn(pixels.shape, generator=generator)
            pixels = (pixels + self.noise_std * noise).clamp(0, 1)
        return spec.normalize(pixels)


@dataclass(frozen=True)
class Normal:
    """Normal noise of mean 0 and deviation ``std`` in model space (DLG, Inverting Gradients).

    Attributes:
        std: standard deviation in units of the normalised input, ≥ 0; 0 is the data's mean.
    """

    std: float = 1.0

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Return inputs (B, C, H, W) in model space."""
        return self.std * torch.randn(num_samples, *spec.shape, generator=generator)
