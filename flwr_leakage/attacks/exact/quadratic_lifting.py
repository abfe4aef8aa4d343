"""All errors of a batch at once, if the next layer leaves few directions to them.

A layer with weights W₂ follows a linear layer with ReLU. Its errors lie in a known span V₂ (of
K − 1 directions for the logits: errors of cross-entropy sum to zero). Then entry j of a sample's
error f = U q is zero if the sample leaves unit j inactive, and ``h_j = (W₂ᵀ V₂ e)_j`` otherwise.
Either way

    f_j (f_j − h_j) = 0    for every unit j.

This is one equation for each unit, quadratic in (q, e), and linear in the matrices q qᵀ and q eᵀ.
With b samples and r directions of e there are b (b + 1) / 2 + r b unknowns. If there are more
units, the b samples' own solutions span the null space. Two random matrices in it are ``Q D₁ Qᵀ``
and ``Q D₂ Qᵀ`` with diagonal D, and the eigenvectors of ``(Q D₁ Qᵀ)(Q D₂ Qᵀ)⁻¹`` are the columns
of Q (Jennrich's algorithm: Harshman 1970). There is no search and no start.
"""

import torch
from torch import Tensor


def fits(units: int, samples: int, directions: int, most: float = 0.95) -> bool:
    """Return whether the unknowns are at most the share ``most`` of the units."""
    return samples * (samples + 1) // 2 + directions * samples <= most * units


def lifted_columns(left: Tensor, behind: Tensor, generator: torch.Generator) -> Tensor:
    """Return the columns q of Q, up to their lengths.

    Args:
        left: U (m, b), the rows of the units that some sample activates.
        behind: W₂ᵀ V₂ (m, r), the rows of the same units.
        generator: draws the two random matrices.

    Returns:
        (b, b), one column for each sample.
    """
    units, samples = left.shape
    behind = torch.linalg.qr(behind).Q * units**0.5
    left = left * units**0.5
    rows, columns = torch.triu_indices(samples, samples)
    # The off-diagonal entries of a symmetric matrix count twice.
    weights = torch.where(rows == columns, 1.0, 2**0.5).to(left)
    squares = left[:, rows] * left[:, columns] * weights
    products = (left[:, :, None] * behind[:, None, :]).reshape(units, -1)
    lifted = torch.cat([squares, -products], dim=1)
    # The Gram matrix would square the noise, which hides the smallest singular values.
    null = torch.linalg.svd(lifted, full_matrices=False).Vh[-samples:]
    matrices = left.new_zeros(samples, samples, samples)
    matrices[:, rows, columns] = null[:, : len(rows)] / weights
    matrices[:, columns, rows] = null[:, : len(rows)] / weights
    mixing = torch.randn(2, samples, generator=generator, dtype=torch.float64).to(left)
    first, second = torch.einsum("sk,kij->sij", mixing, matrices)
    vectors = torch.linalg.eig(torch.linalg.solve(second, first, left=False)).eigenvectors.real
    return vectors / vectors.norm(dim=0)
