"""Noise as a start."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.records import InputSpec


@dataclass(frozen=True)
class Normal:
    """Standard normal noise in model space, times ``std`` (DLG, Inverting Gradients).

    Attributes:
        std: standard deviation in units of the normalised input, ≥ 0; 0 is the data's mean.
    """

    std: float = 1.0

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Float[Tensor, "B C H W"]:
        """Return inputs (B, C, H, W) in model space."""
        return self.std * torch.randn(num_samples, *spec.shape, generator=generator)
