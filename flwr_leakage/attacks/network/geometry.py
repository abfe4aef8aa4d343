"""The geometry of convolutions: the entries of the input that each output sees."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """The settings of a two-dimensional convolution, each for rows and for columns.

    Attributes:
        kernel_size: number of entries that one output sees.
        dilation: distance between neighbouring entries of these.
        padding: number of zeros on each side of the input.
        stride: distance between the entries of neighbouring outputs.
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
        """Return a geometry from pairs, or from numbers that hold for both rows and columns."""
        return cls(pair(kernel_size), pair(dilation), pair(padding), pair(stride))

    def positions(self, size: Iterable[int]) -> Pair:
        """Return the rows and columns of the outputs for inputs of a size (H, W)."""
        height, width = (
            (length + 2 * zeros - spread * (kernel - 1) - 1) // step + 1
            for length, kernel, spread, zeros, step in zip(size, *self, strict=True)
        )
        return height, width

    def patches(self, inputs: Tensor) -> Tensor:
        """Return the entries of inputs (B, C, H, W) that each output sees.

        Returns:
            (B, C·K, P), with P positions of the outputs and K entries of the kernel.
        """
        return F.unfold(inputs, *self)


def pair(value: int | Iterable[int]) -> Pair:
    """Return a setting as (rows, columns); a single number holds for both."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def numeric_padding(
    padding: str | int | Iterable[int], kernel_size: Iterable[int], dilation: int | Iterable[int]
) -> Pair:
    """Return padding as zeros (rows, columns) on each side, also for ``"same"`` and ``"valid"``.

    Raises:
        ValueError: ``"same"`` needs more zeros on one side than on the other.

    Example:
        >>> numeric_padding("same", (3, 5), 1), numeric_padding("valid", (3, 5), 1)
        ((1, 2), (0, 0))
    """
    if padding == "valid":
        return (0, 0)
    if padding != "same":
        assert not isinstance(padding, str)
        return pair(padding)
    totals = [d * (k - 1) for k, d in zip(kernel_size, pair(dilation), strict=True)]
    if any(total % 2 for total in totals):
        raise ValueError("padding='same' must add as many zeros on both sides: an odd kernel.")
    return totals[0] // 2, totals[1] // 2


def zeros_around(
    input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Pair | None:
    """Return the rows and columns of zeros that a call of ``F.pad`` adds on each side of maps.

    It returns None if the call pads another value, or differently on two sides. The arguments are
    those of ``F.pad``.
    """
    sides = tuple(pad)
    if mode != "constant" or value or len(sides) != 4 or min(sides) < 0:
        return None
    left, right, top, bottom = sides
    return (top, left) if left == right and top == bottom else None
