"""Compute Euclidean norms of long vectors accurately in single precision."""

import torch
from jaxtyping import Float
from torch import Tensor

SMALLEST_SQUARE = 1e-30
"""Sum of a row's squares in float32 below which underflow may have changed the sum, so that the row
is scaled first. Squares below 1e-38 lose digits, and each of them is less than 1e-8 of a larger
sum."""


def row_norms(rows: Float[Tensor, "S D"]) -> Float[Tensor, " S"]:
    """Return the Euclidean norm (S,) of each row.

    ``torch.linalg.vector_norm`` adds the squares one after the other, so that in float32 its error
    is 4e-4 at 1e7 entries; ``sum`` adds in pairs and keeps seven digits. Rows of small norm, such
    as gradients of confident samples, are scaled first, as their squares would underflow.
    """
    squares = rows.square().sum(1)
    if rows.dtype != torch.float32 or not bool((squares < SMALLEST_SQUARE).any()):
        return squares.sqrt()
    peak = rows.abs().amax(1, keepdim=True)
    scaled = rows / torch.where(peak > 0, peak, 1.0)
    return torch.where(
        squares < SMALLEST_SQUARE, peak[:, 0] * scaled.square().sum(1).sqrt(), squares.sqrt()
    )
