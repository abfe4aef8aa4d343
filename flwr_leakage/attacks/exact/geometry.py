"""How the outputs of a convolution see its input."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Where a two-dimensional convolution looks, each setting for rows and for columns.

    Attributes:
        kernel_size: entries that one output sees.
        dilation: step between these.
        padding: zeros around the input.
        stride: step from one output to the next.
    """

    kernel_size: Pair
    dilation: Pair = (1, 1)
    padding: Pair = (0, 0)
    stride: Pair = (1, 1)

    @classmethod
    def of(
        cls,
        kernel_size: int | Iterable[int],
        dilation: int | Iterable[int],
        padding: int | Iterable[int],
        stride: int | Iterable[int],
    ) -> "Geometry":
        """The same from numbers that stand for both rows and columns, or from pairs."""
        return cls(pair(kernel_size), pair(dilation), pair(padding), pair(stride))

    def patches(self, inputs: Tensor) -> Tensor:
        """What each output sees of inputs (B, C, H, W): (B, C·K, P), of P outputs and K entries."""
        return F.unfold(inputs, *self)


def pair(value: int | Iterable[int]) -> Pair:
    """A setting for rows and columns."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)
