"""Lanczos with full reorthogonalisation, of S operators at once."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.lengths import row_norms
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import (
    Estimate,
    normalize_rows,
    orthogonalize,
)


class Lanczos:
    """The Lanczos process of AᵀA, ``AᵀA V = V T + β v eᵀ``, with V kept orthonormal.

    The process is that of Lanczos 1950, with full reorthogonalisation as in Parlett, The Symmetric
    Eigenvalue Problem, section 13.7. ``step`` costs one Gram product.

    A block whose Krylov space is exhausted continues with zero vectors. Its new rows of T are not
    coupled to the others, and repeat T's first entry. That is a Rayleigh quotient, so that the
    largest and the smallest eigenvalue of T do not change.

    Args:
        operator: the operators A, of S blocks.
        start: (S, N) the first vector of each block, not zero.
        image: (S, P) A·start if it is known. The first step then takes half a Gram product.
    """

    def __init__(
        self,
        operator: LinearOperator,
        start: Float[Tensor, "S N"],
        image: Float[Tensor, "S P"] | None = None,
    ) -> None:
        self.operator = operator
        first, self.start_norm = normalize_rows(start)
        self.basis = first[:, None]
        self._image = None if image is None else image / self.start_norm[:, None]
        self._alphas: list[Tensor] = []
        self._betas: list[Tensor] = []
        self._next = first
        self._scale = torch.zeros_like(self.start_norm)

    @property
    def num_steps(self) -> int:
        """Return the number of steps taken, which is the order of T."""
        return len(self._alphas)

    @property
    def last_beta(self) -> Float[Tensor, " S"]:
        """Return (S,) β_k, the coupling of the last vector to the outside of the Krylov space."""
        return self._betas[-1]

    def step(self) -> None:
        """Extend T by one row; a product that exceeds a budget raises and changes nothing."""
        if self._image is None:
            image = self.operator.gram(self._next)
        else:
            image = self.operator.rmatvec(self._image)
            self._image = None
        if self._alphas:
            self.basis = torch.cat([self.basis, self._next[:, None]], dim=1)
        alpha = (self._next * image).sum(1)
        if self._alphas:
            alpha = torch.where(self._betas[-1] > 0, alpha, self._alphas[0])
        remainder = orthogonalize(image, self.basis)
        self._scale = torch.maximum(self._scale, row_norms(image))
        self._next, beta = normalize_rows(remainder)
        # A remainder below this is rounding, and its direction has no meaning.
        floor = 10 * torch.finfo(beta.dtype).eps * self._scale
        exhausted = (beta <= floor) | torch.tensor(self.num_steps + 1 >= self.operator.num_inputs)
        self._next = torch.where(exhausted[:, None], 0.0, self._next)
        self._alphas.append(alpha)
        self._betas.append(torch.where(exhausted, 0.0, beta))

    def narrow(self, rows: Int[Tensor, " R"]) -> "Lanczos":
        """Return the process of some blocks, which continues from here without the others.

        Args:
            rows: (R,) indices of the blocks, ascending.
        """
        other = copy.copy(self)
        other.operator = self.operator.narrow(rows)
        other.start_norm, other._scale = self.start_norm[rows], self._scale[rows]
        other.basis, other._next = self.basis[rows], self._next[rows]
        other._image = None if self._image is None else self._image[rows]
        other._alphas = [alpha[rows] for alpha in self._alphas]
        other._betas = [beta[rows] for beta in self._betas]
        return other

    @property
    def rayleigh_quotients(self) -> Float[Tensor, "S k"]:
        """Return (S, k) ‖Av‖² of each vector of the basis, the diagonal of T."""
        return torch.stack(self._alphas, 1)

    def tridiagonal(self) -> Float[Tensor, "S k k"]:
        """Return T, with k rows and columns after k steps."""
        alphas = torch.stack(self._alphas, 1)
        result = torch.diag_embed(alphas)
        if self.num_steps > 1:
            betas = torch.stack(self._betas[:-1], 1)
            result = result + torch.diag_embed(betas, 1) + torch.diag_embed(betas, -1)
        return result

    def ritz(self) -> tuple[Float[Tensor, "S k"], Float[Tensor, "S k k"]]:
        """Return the eigenvalues of T, ascending, and its eigenvectors as columns."""
        values, vectors = torch.linalg.eigh(self.tridiagonal().double())
        return values, vectors


@dataclass(frozen=True)
class EigenPairs:
    """The largest or the smallest eigenvalue of each block, with its eigenvector (S, N)."""

    estimate: Estimate
    vectors: Float[Tensor, "S N"]


def random_start(operator: LinearOperator, generator: Draws) -> Float[Tensor, "S N"]:
    """Return a Gaussian vector for each block; operators of equal shape get the same draws."""
    draw = normal_rows((operator.num_blocks, operator.num_inputs), generator)
    return draw.to(dtype=operator.dtype, device=operator.device)
