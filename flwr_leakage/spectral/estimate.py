"""Define the result of estimators, and the operations that they share."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.operators.lengths import row_norms


@dataclass(frozen=True)
class Estimate:
    """An estimate of one number for each of S matrices, with its convergence.

    Attributes:
        value: (S,) the estimates; where ``converged`` is false, a value is a bound at best.
        converged: (S,) whether the value is within the tolerance that was asked for.
        residual: (S,) relative error of the value, including rounding. Where ``converged`` is
            false, this is the estimator's own estimate of the error, which may be too small.
        products: number of products with a matrix or its transpose, for each matrix.
        method: the name of the method that computed the value.
    """

    value: Float[Tensor, " S"]
    converged: Bool[Tensor, " S"]
    residual: Float[Tensor, " S"]
    products: int
    method: str


def normalize_rows(vectors: Float[Tensor, "S N"]) -> tuple[Tensor, Tensor]:
    """Return the rows (S, N) scaled to length 1, and their lengths (S,) before.

    A row of zeros stays zero.
    """
    lengths = row_norms(vectors)
    return vectors / torch.where(lengths > 0, lengths, 1.0)[:, None], lengths


def orthogonalize(
    vectors: Float[Tensor, "S N"], basis: Float[Tensor, "S k N"]
) -> Float[Tensor, "S N"]:
    """Return vectors (S, N) without their components along a basis.

    The components are removed twice, because of rounding.

    Args:
        vectors: one vector for each of S bases.
        basis: k orthonormal vectors for each s; vectors of zeros are allowed.
    """
    for _ in range(2):
        along = torch.bmm(basis, vectors[:, :, None])
        vectors = vectors - torch.bmm(along.transpose(1, 2), basis)[:, 0]
    return vectors


def remaining_growth(history: list[Tensor]) -> Tensor:
    """Return an estimate of how much growing sequences will still grow, relative to their last.

    The estimate is the growth over the last quarter of the entries (three at least). It is right
    for a sequence whose distance from its limit falls by a half over that many entries, and too
    large for a faster one. It is infinite for three or fewer entries.

    Args:
        history: the entries so far, each a tensor (S,) with one number for each of S sequences.

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
