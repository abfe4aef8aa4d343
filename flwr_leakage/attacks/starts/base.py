"""The call shape of every start."""

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
        """Inputs (B, C, H, W) in model space.

        Args:
            spec: shape (C, H, W) and normalisation of an input.
            num_samples: B.
            restart: 0, 1, … for successive starts of one target.
            generator: of the random draws.
        """
        ...
