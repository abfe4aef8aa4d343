"""Precondition conjugate gradients by a low-rank approximation of a matrix from some columns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.cholesky import cholesky


@dataclass(frozen=True)
class LowRank:
    """A low-rank approximation A ≈ Uᵀ Λ U of a positive semidefinite matrix A (D, D).

    Attributes:
        vectors: (k, D) matrix U, whose orthonormal rows are approximate eigenvectors.
        values: (k,) diagonal of Λ, the approximate eigenvalues, descending.
    """

    vectors: Tensor
    values: Tensor

    @classmethod
    def from_columns(cls, columns: Tensor, chosen: Tensor) -> "LowRank":
        """Return the Nyström approximation ``A ≈ Cᵀ K⁻¹ C`` (Williams and Seeger 2000) from k
        columns of A, the rows of C (k, D), with ``chosen`` their different indices in A, and K (k,
        k) the columns of C at these indices. A small multiple of the identity is added to A before
        and subtracted after, so that K stays positive definite under rounding (Tropp et al. 2017,
        Algorithm 3).
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
        """Return the map v ↦ P v (D,) by the preconditioner P of A + shift I, with shift > 0: ``I +
        Uᵀ ((λ_k + shift) / (Λ + shift) − 1) U``, with the least entry λ_k of Λ (Frangella, Tropp
        and Udell 2023, eq. 1.3). Up to a factor, P is (A + shift I)⁻¹ if all other eigenvalues of A
        equal λ_k.
        """
        factors = (self.values[-1] + shift) / (self.values + shift) - 1
        return lambda vector: vector + self.vectors.T @ (factors * (self.vectors @ vector))
