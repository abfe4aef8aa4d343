"""Golub–Kahan bidiagonalisation from a vector of outputs, of S operators at once."""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.bidiagonal import lower_bidiagonal
from flwr_leakage.spectral.estimate import normalize_rows, orthogonalize


class Bidiagonalization:
    """A V = U B from b, with B lower bidiagonal and V kept orthonormal.

    Golub and Kahan 1965, as in LSQR (Paige and Saunders 1982, section 3). ``step`` costs two
    products, and the start one.

    Args:
        operator: A, of S blocks.
        right_hand_side: b, (S, P).

    Attributes:
        blocks: which blocks of the first operator these are, see ``take``.
        scale: ‖b‖.
        basis: V, the rows of (S, k, N).
        alpha: the entry of B's diagonal that comes next.
        exhausted: the Krylov space is all that can be reached; what comes next is zero.
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
        """Steps taken: the columns of B."""
        return len(self.diagonal)

    def step(self, last: bool = False) -> None:
        """Add a column to B; a product that exceeds a budget raises.

        Args:
            last: no other step follows; the second product, which prepares it, is left out.
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
        """Some of the blocks, which go on from here without the others."""
        other = copy.copy(self)
        other.operator = self.operator.narrow(rows)
        for name in ("blocks", "left", "scale", "right", "alpha", "basis", "exhausted"):
            setattr(other, name, getattr(self, name)[rows])
        other.diagonal = [entry[rows] for entry in self.diagonal]
        other.below = [entry[rows] for entry in self.below]
        return other

    def matrix(self) -> Float[Tensor, "S k1 k"]:
        """B, of k columns after k steps, in float64."""
        return lower_bidiagonal(self.diagonal, self.below)
