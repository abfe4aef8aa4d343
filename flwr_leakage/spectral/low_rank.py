"""Preconditioners of conjugate gradients by a matrix's largest eigenvalues, from some columns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.cholesky import cholesky


@dataclass(frozen=True)
class LowRank:
    """An approximation A ≈ Uᵀ Λ U of a positive semidefinite matrix A (D, D).

    Attributes:
        vectors: (k, D) matrix U, whose orthonormal rows are approximate eigenvectors.
        values: (k,) diagonal of Λ, the approximate eigenvalues, descending.
    """

    vectors: Tensor
    values: Tensor

    @classmethod
    def from_columns(cls, columns: Tensor, chosen: Tensor) -> "LowRank":
        """Return the Nyström approximation (Williams and Seeger 2000) of A from k of its columns.

        ``A ≈ Cᵀ K⁻¹ C``, where the rows of C are the k columns of A, and K consists of the k
        columns of C with the same indices.

        A small multiple of the identity is added before and subtracted after, so that the matrix
        stays positive definite under rounding (Tropp et al. 2017, Algorithm 3).

        Args:
            columns: (k, D) matrix C of columns of A, which are rows as well, as A is symmetric.
            chosen: (k,) their indices in A, all different.
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
        """Return (A + shift I)⁻¹ up to a factor, with A's other eigenvalues set to the least known.

        It is ``I + Uᵀ ((λ_k + shift) / (Λ + shift) − 1) U`` (Frangella, Tropp and Udell 2023, eq.
        1.3), with the least known eigenvalue λ_k.

        Args:
            shift: the shift, > 0.

        Returns:
            The product with a flat vector (D,).
        """
        factors = (self.values[-1] + shift) / (self.values + shift) - 1
        return lambda vector: vector + self.vectors.T @ (factors * (self.vectors @ vector))
