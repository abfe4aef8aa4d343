"""Which entries of its input a convolution looks at."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Where a two-dimensional convolution looks, each setting for rows and for columns.

    Attributes:
        kernel_size: how many entries one output sees.
        dilation: distance between neighbouring ones of these.
        padding: zeros added on each side of the input.
        stride: how far the next output's entries are shifted.
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
        """A geometry from pairs, or from numbers that hold for both rows and columns."""
        return cls(pair(kernel_size), pair(dilation), pair(padding), pair(stride))

    def positions(self, size: Iterable[int]) -> Pair:
        """Rows and columns of the outputs for inputs of a size (H, W)."""
        height, width = (
            (length + 2 * zeros - spread * (kernel - 1) - 1) // step + 1
            for length, kernel, spread, zeros, step in zip(size, *self, strict=True)
        )
        return height, width

    def patches(self, inputs: Tensor) -> Tensor:
        """The entries of inputs (B, C, H, W) that each output sees.

        Returns:
            (B, C·K, P), with P positions of the outputs and K entries of the kernel.
        """
        return F.unfold(inputs, *self)


def pair(value: int | Iterable[int]) -> Pair:
    """A setting as (rows, columns), where one number holds for both."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def numeric_padding(
    padding: str | int | Iterable[int], kernel_size: Iterable[int], dilation: int | Iterable[int]
) -> Pair:
    """Zeros on each side that ``padding="same"`` or ``"valid"`` stands for.

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
    """Rows and columns of zeros that ``F.pad`` adds on each side of maps, if it does just that."""
    sides = tuple(pad)
    if mode != "constant" or value or len(sides) != 4 or min(sides) < 0:
        return None
    left, right, top, bottom = sides
    return (top, left) if left == right and top == bottom else None
