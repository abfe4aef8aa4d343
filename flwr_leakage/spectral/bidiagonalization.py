"""Golub–Kahan bidiagonalisation from a vector of outputs, of S operators at once."""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.bidiagonal import lower_bidiagonal
from flwr_leakage.spectral.estimate import normalize_rows, orthogonalize


class Bidiagonalization:
    """The bidiagonalisation A V = U B from b, with B lower bidiagonal and V kept orthonormal.

    The process is that of Golub and Kahan 1965, as in LSQR (Paige and Saunders 1982, section 3).
    ``step`` costs two products, and the start one.

    Args:
        operator: the operators A, of S blocks.
        right_hand_side: (S, P) vectors b.

    Attributes:
        blocks: (S,) indices of the blocks in the first operator; see ``take``.
        scale: (S,) ‖b‖.
        basis: (S, k, N) the columns of V.
        alpha: (S,) the next entry of B's diagonal.
        exhausted: (S,) whether the Krylov space is complete, so that the next vectors are zero.
    """

    def __init__(self, operator: LinearOperator, right_hand_side: Float[Tensor, "S P"]) -> None:
        self.operator = operator
        self.blocks = torch.arange(operator.num_blocks)
        self.left, beta = normalize_rows(right_hand_side)
        self.scale = beta.double()
        self.right, self.alpha = normalize_rows(operator.rmatvec(self.left))
        self.basis = self.right[:, None][:, :0]
        self.exhausted = torch.zeros_like(self.alpha, dtype=torch.bool)
        self.diagonal: list[Tensor] = []
        self.below: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        """Number of steps taken, which is that of the columns of B."""
        return len(self.diagonal)

    def step(self, last: bool = False) -> None:
        """Add a column to B; a product that exceeds a budget raises.

        Args:
            last: whether no other step follows; the second product, which prepares it, is then
                left out.
        """
        operator, left, right, alpha = self.operator, self.left, self.right, self.alpha
        left, beta = normalize_rows(operator.matvec(right) - alpha[:, None] * left)
        self.basis = torch.cat([self.basis, right[:, None]], dim=1)
        self.diagonal.append(alpha.double())
        self.below.append(beta.double())
        if last:
            return
        right, alpha = normalize_rows(
            orthogonalize(operator.rmatvec(left) - beta[:, None] * right, self.basis)
        )
        tiny = torch.finfo(alpha.dtype).eps * self.diagonal[0].to(alpha.dtype)
        self.exhausted = (alpha <= tiny) | torch.tensor(self.num_steps >= operator.num_inputs)
        self.alpha = torch.where(self.exhausted, 0.0, alpha)
        self.left, self.right = left, torch.where(self.exhausted[:, None], 0.0, right)

    def take(self, rows: Int[Tensor, " R"]) -> "Bidiagonalization":
        """Return the process of some blocks, which continues from here without the others."""
        other = copy.copy(self)
        other.operator = self.operator.narrow(rows)
        for name in ("blocks", "left", "scale", "right", "alpha", "basis", "exhausted"):
            setattr(other, name, getattr(self, name)[rows])
        other.diagonal = [entry[rows] for entry in self.diagonal]
        other.below = [entry[rows] for entry in self.below]
        return other

    def matrix(self) -> Float[Tensor, "S k1 k"]:
        """Return B, with k columns after k steps, in float64."""
        return lower_bidiagonal(self.diagonal, self.below)
