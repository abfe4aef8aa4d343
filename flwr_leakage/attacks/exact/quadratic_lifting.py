"""All errors of a batch at once, where the layer behind leaves few directions to them.

Behind a linear layer with ReLU comes a layer of weights W₂, whose errors lie in a known span V₂ (of
K − 1 directions for the logits: errors of cross-entropy sum to zero). Then entry j of a sample's
error f = U q is zero where the sample leaves unit j inactive, and ``h_j = (W₂ᵀ V₂ e)_j`` where it
does not. Either way

    f_j (f_j − h_j) = 0    for every unit j:

one equation a unit, quadratic in (q, e), and linear in the matrices q qᵀ and q eᵀ. With b samples
and r directions of e these are b (b + 1) / 2 + r b unknowns. Where there are more units, the null
space is spanned by the b samples' own solutions: two random matrices out of it are ``Q D₁ Qᵀ`` and
``Q D₂ Qᵀ`` with diagonal D, and the eigenvectors of ``(Q D₁ Qᵀ)(Q D₂ Qᵀ)⁻¹`` are the columns of Q
(Jennrich's algorithm: Harshman 1970). There is no search and no start.
"""

import torch
from torch import Tensor

ROOM = 0.95
"""The largest share of the units that the number of unknowns may be."""


def fits(units: int, samples: int, directions: int) -> bool:
    """Whether there are enough units for the unknowns."""
    return samples * (samples + 1) // 2 + directions * samples <= ROOM * units


def lifted_columns(left: Tensor, behind: Tensor, generator: torch.Generator) -> Tensor:
    """The columns q of Q, up to their lengths.

    Args:
        left: U (m, b), of the units that are not dead.
        behind: W₂ᵀ V₂ (m, r).
        generator: of the two random matrices.

    Returns:
        (b, b), a column a sample.
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
    # The Gram matrix would square the noise: what is wanted is what is smallest.
    null = torch.linalg.svd(lifted, full_matrices=False).Vh[-samples:]
    matrices = left.new_zeros(samples, samples, samples)
    matrices[:, rows, columns] = null[:, : len(rows)] / weights
    matrices[:, columns, rows] = null[:, : len(rows)] / weights
    mixing = torch.randn(2, samples, generator=generator, dtype=torch.float64).to(left)
    first, second = torch.einsum("sk,kij->sij", mixing, matrices)
    vectors = torch.linalg.eig(torch.linalg.solve(second, first, left=False)).eigenvectors.real
    return vectors / vectors.norm(dim=0)
