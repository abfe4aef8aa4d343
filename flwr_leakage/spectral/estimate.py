"""The result of every estimator, and parts that estimators share."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.operators.lengths import row_norms


@dataclass(frozen=True)
class Estimate:
    """One number for each of S blocks of an operator, with its convergence.

    Attributes:
        value: (S,) estimates; if ``converged`` is false, a value is a bound at best.
        converged: (S,) whether the value is within the given tolerance.
        residual: (S,) relative error of the value, with rounding. If it did not converge, this is
            the estimator's own estimate of the error, which may be too small.
        products: number of ``matvec`` and ``rmatvec`` for each operator.
        method: the name of the method that computed it.
    """

    value: Float[Tensor, " S"]
    converged: Bool[Tensor, " S"]
    residual: Float[Tensor, " S"]
    products: int
    method: str


def normalize_rows(vectors: Float[Tensor, "S N"]) -> tuple[Tensor, Tensor]:
    """Return the rows' unit vectors and lengths; a zero row stays zero."""
    lengths = row_norms(vectors)
    return vectors / torch.where(lengths > 0, lengths, 1.0)[:, None], lengths


def orthogonalize(
    vectors: Float[Tensor, "S N"], basis: Float[Tensor, "S k N"]
) -> Float[Tensor, "S N"]:
    """Return vectors without their components along an orthonormal basis.

    They are removed twice, because of rounding.
    """
    for _ in range(2):
        along = torch.bmm(basis, vectors[:, :, None])
        vectors = vectors - torch.bmm(along.transpose(1, 2), basis)[:, 0]
    return vectors


def remaining_growth(history: list[Tensor]) -> Tensor:
    """Return an estimate of a growing sequence's remaining growth, relative to its last entry.

    The estimate is the growth over the last quarter of the steps (three at least). It is right for
    a sequence whose error falls by a half in that many steps, and too large for a faster one.

    Example:
        >>> history = [torch.tensor(1 - 0.5**k, dtype=torch.float64) for k in range(20)]
        >>> bool(remaining_growth(history) >= 0.5**19)
        True
    """
    window = max(3, len(history) // 4)
    last = history[-1]
    if len(history) <= window:
        return torch.full_like(last, torch.inf)
    growth = torch.stack([(last - earlier).abs() for earlier in history[-1 - window :]]).amax(0)
    return growth / last.abs().clamp_min(torch.finfo(last.dtype).tiny)
