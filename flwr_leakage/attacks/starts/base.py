"""The interface of every start."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.records import InputSpec


@runtime_checkable
class Initialisation(Protocol):
    """Draws an attack's first candidate."""

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
