"""A matrix's largest eigenvalues from some of its columns, to precondition conjugate gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.cholesky import cholesky


@dataclass(frozen=True)
class LowRank:
    """An approximation A ≈ Uᵀ Λ U of a positive semidefinite matrix A (D, D).

    Attributes:
        vectors: U (k, D), with orthonormal rows: approximate eigenvectors.
        values: the diagonal of Λ (k,), descending: approximate eigenvalues.
    """

    vectors: Tensor
    values: Tensor

    @classmethod
    def from_columns(cls, columns: Tensor, chosen: Tensor) -> "LowRank":
        """The Nyström approximation (Williams and Seeger 2000) of A from k of its columns.

        ``A ≈ Cᵀ K⁻¹ C``, where the rows of C are the k columns of A, and K are the k of C's own
        columns with the same indices.

        A small multiple of the identity is added before and subtracted after, so that the matrix
        stays positive definite under rounding (Tropp et al. 2017, Algorithm 3).

        Args:
            columns: C (k, D), columns of A or, as A is symmetric, rows.
            chosen: their indices (k,) in A, all different.
        """
        shift = float(torch.finfo(columns.dtype).eps * columns.norm().clamp_min(1e-30))
        core = columns[:, chosen]
        factor, shift = cholesky((core + core.T) / 2, shift)
        shifted = columns.clone()
        shifted[torch.arange(len(chosen)), chosen] += shift
        root = torch.linalg.solve_triangular(factor, shifted, upper=False)
        values, rotation = torch.linalg.eigh(root @ root.T)
        values = values.flip(0).clamp_min(shift)
        vectors = rotation.flip(1).T @ root / values.sqrt()[:, None]
        return cls(vectors, values - shift)

    def preconditioner(self, shift: float) -> Callable[[Tensor], Tensor]:
        """(A + shift I)⁻¹ up to a factor, as if A's unknown eigenvalues were the least known one.

        It is ``I + Uᵀ ((λ_k + shift) / (Λ + shift) − 1) U`` (Frangella, Tropp and Udell 2023, eq.
        1.3), with the least known eigenvalue λ_k.

        Args:
            shift: > 0.

        Returns:
            The product with a flat vector (D,).
        """
        factors = (self.values[-1] + shift) / (self.values + shift) - 1
        return lambda vector: vector + self.vectors.T @ (factors * (self.vectors @ vector))
