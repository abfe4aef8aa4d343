"""The facts that an update tells about the inputs of a layer, and the mask of the ReLU behind them.

Every attack that reads features from a gradient states them in these terms, whatever its algebra:
a value with a bound of its error, and for the outputs of a ReLU whether each unit is on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The states of the units of a ReLU. A unit that is neither on nor off is open.

    Attributes:
        on: booleans, true for units that are certainly on.
        off: booleans of the same shape, true for units that are certainly off.
    """

    on: Tensor
    off: Tensor

    @classmethod
    def of(cls, on: Tensor) -> "Mask":
        """Return the mask of units that are either on or off."""
        return cls(on, ~on)

    @property
    def open(self) -> Tensor:
        """Booleans, true for units of unknown state."""
        return ~(self.on | self.off)

    def gate(self, on: Tensor | float, otherwise: Tensor) -> Tensor:
        """Return ``on`` for units that are on, 0 for units that are off, ``otherwise`` for others.

        Example:
            >>> mask = Mask(torch.tensor([True, False, False]), torch.tensor([False, True, False]))
            >>> mask.gate(1.0, torch.full((3,), 0.5))
            tensor([1.0000, 0.0000, 0.5000])
        """
        closed = torch.where(self.off, torch.zeros_like(otherwise), otherwise)
        return torch.where(self.on, torch.as_tensor(on).to(otherwise), closed)


@dataclass(frozen=True)
class Known:
    """The inputs h of a layer as an update tells them, with the states of the units they come from.

    Attributes:
        values: h, zero where nothing is told.
        bounds: largest distance of an entry from its value beside its noise: 0 for entries that are
            told, ∞ for entries about which nothing is told.
        mask: the mask of the ReLU whose outputs these entries are.
    """

    values: Tensor
    bounds: Tensor
    mask: Mask

    @classmethod
    def nothing(cls, like: Tensor) -> "Known":
        """Return the entries of the shape of ``like``, with nothing told about them."""
        nowhere = torch.zeros_like(like, dtype=torch.bool)
        bounds = torch.full_like(like, torch.inf)
        return cls(torch.zeros_like(like), bounds, Mask(nowhere, nowhere))

    def reshape(self, *shape: int) -> "Known":
        """Return the same facts in another shape."""
        mask = Mask(self.mask.on.reshape(shape), self.mask.off.reshape(shape))
        return Known(self.values.reshape(shape), self.bounds.reshape(shape), mask)

    @property
    def told(self) -> Tensor:
        """Booleans, true for entries whose value is told."""
        return self.bounds == 0
