"""Run the Lanczos process with full reorthogonalisation, for S matrices at once."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.lengths import row_norms
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import (
    Estimate,
    Process,
    normalize_rows,
    orthogonalize,
)


class Lanczos(Process):
    """The Lanczos process ``AᵀA V = V T + β v eᵀ`` for each of S matrices A (P, N).

    After k steps, the k columns of V are an orthonormal basis of the Krylov space of AᵀA and a
    start vector, T (k, k) is tridiagonal, v is the next basis vector, β its coupling, and e the
    last unit vector. The process is that of Lanczos 1950, with full reorthogonalisation as in
    Parlett, The Symmetric Eigenvalue Problem, section 13.7. A step costs one product with AᵀA.

    If the Krylov space of a matrix is exhausted, its process continues with zero vectors. New rows
    of T are uncoupled, and repeat T's first entry, so that its extreme eigenvalues do not change.

    Args:
        operator: the S matrices A.
        start: (S, N) the start vector for each matrix, not zero.
        image: (S, P) A·start if it is known. The first step then takes half of a product.
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
        """Return the number of steps taken, which is the order of the tridiagonal matrix T."""
        return len(self._alphas)

    @property
    def last_beta(self) -> Float[Tensor, " S"]:
        """Return the entry β (S,) that the next step adds beside the diagonal of the tridiagonal
        matrix T; 0 if the Krylov space is exhausted.
        """
        return self._betas[-1]

    def step(self) -> None:
        """Take one step, which adds a basis vector, and a row and column of the tridiagonal T. If
        the operator's budget of products does not allow it, an error is raised, and nothing
        changes.
        """
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
        # A remainder of a norm below this floor is rounding, whose direction has no meaning. Then
        # the Krylov space counts as exhausted.
        floor = 10 * torch.finfo(beta.dtype).eps * self._scale
        exhausted = (beta <= floor) | torch.tensor(self.num_steps + 1 >= self.operator.num_inputs)
        self._next = torch.where(exhausted[:, None], 0.0, self._next)
        self._alphas.append(alpha)
        self._betas.append(torch.where(exhausted, 0.0, beta))

    @property
    def rayleigh_quotients(self) -> Float[Tensor, "S k"]:
        """Return ‖Av‖² (S, k) of each basis vector v: the diagonal of the tridiagonal matrix T."""
        return torch.stack(self._alphas, 1)

    def tridiagonal(self) -> Float[Tensor, "S k k"]:
        """Return the tridiagonal matrices T = VᵀAᵀA V (S, k, k) after k steps, with basis vectors
        V.
        """
        result = torch.diag_embed(self.rayleigh_quotients)
        if self.num_steps > 1:
            betas = torch.stack(self._betas[:-1], 1)
            result = result + torch.diag_embed(betas, 1) + torch.diag_embed(betas, -1)
        return result

    def ritz(self) -> tuple[Float[Tensor, "S k"], Float[Tensor, "S k k"]]:
        """Return the Ritz values (S, k) of AᵀA, ascending, and coefficients (S, k, k) of its
        approximate eigenvectors in the basis, as columns: the eigenvalues and eigenvectors of the
        tridiagonal T.
        """
        values, vectors = torch.linalg.eigh(self.tridiagonal().double())
        return values, vectors


@dataclass(frozen=True)
class EigenPairs:
    """An extreme eigenvalue of AᵀA for each of S matrices A, with its eigenvector.

    Attributes:
        estimate: the eigenvalues, either the largest or the smallest ones.
        vectors: (S, N) their eigenvectors.
    """

    estimate: Estimate
    vectors: Float[Tensor, "S N"]


def random_start(operator: LinearOperator, generator: Draws) -> Float[Tensor, "S N"]:
    """Return a standard normal start vector (N,) for each of the S matrices of an operator.

    Args:
        operator: the matrices, of which only S and N count.
        generator: the generator for all matrices, or one generator for each.
    """
    draw = normal_rows((operator.num_blocks, operator.num_inputs), generator)
    return draw.to(dtype=operator.dtype, device=operator.device)
