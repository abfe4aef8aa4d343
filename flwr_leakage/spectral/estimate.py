"""What every estimator returns."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """One number for each of S operators, and whether to believe it.

    Attributes:
        value: (S,); where ``converged`` is false it is no estimate but at most a bound.
        converged: (S,) whether the value is within the tolerance asked for.
        residual: (S,) the estimator's own relative error estimate.
        products: ``matvec`` and ``rmatvec`` spent for each operator.
        method: what computed it.
    """

    value: Float[Tensor, " S"]
    converged: Bool[Tensor, " S"]
    residual: Float[Tensor, " S"]
    products: int
    method: str


def normalize_rows(vectors: Float[Tensor, "S N"]) -> tuple[Tensor, Tensor]:
    """Return the rows' unit vectors and lengths; a zero row stays zero."""
    # torch's vector_norm is 4e-4 off for 1e7 entries in float32, while sum adds in pairs.
    lengths = vectors.square().sum(1).sqrt()
    return vectors / torch.where(lengths > 0, lengths, 1.0)[:, None], lengths


def orthogonalize(
    vectors: Float[Tensor, "S N"], basis: Float[Tensor, "S k N"]
) -> Float[Tensor, "S N"]:
    """Remove the components along an orthonormal basis, twice, as rounding demands."""
    for _ in range(2):
        along = torch.bmm(basis, vectors[:, :, None])
        vectors = vectors - torch.bmm(along.transpose(1, 2), basis)[:, 0]
    return vectors


def remaining_growth(history: list[Tensor]) -> Tensor:
    """Estimate how much a growing sequence still has to grow, relative to its last entry.

    It is taken to be what the last quarter of the steps (three at least) brought: right for a
    sequence whose error falls by a half in that many steps, and too large for a faster one.

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
