"""Where a reconstruction starts."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.records import InputSpec


@runtime_checkable
class Initialisation(Protocol):
    """Draws the first candidate."""

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Tensor:
        """Inputs (B, C, H, W) in model space for restart 0, 1, …"""
        ...


@dataclass(frozen=True)
class Normal:
    """Standard normal noise in model space, times ``std`` (DLG, Inverting Gradients).

    Attributes:
        std: in units of the normalised input, ≥ 0; 0 starts at the data's mean.
    """

    std: float = 1.0

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Draw the first candidate."""
        return self.std * torch.randn(num_samples, *spec.shape, generator=generator)


@dataclass(frozen=True)
class Grey:
    """Mid-grey pixels; from the second restart on with normal noise added.

    Attributes:
        noise_std: of the noise in pixel units, ≥ 0.
    """

    noise_std: float = 0.1

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Draw the first candidate."""
        pixels = torch.full((num_samples, *spec.shape), 0.5)
        if restart > 0 or num_samples > 1:
            noise = torch.randn(pixels.shape, generator=generator)
            pixels = (pixels + self.noise_std * noise).clamp(0, 1)
        return spec.normalize(pixels)
