"""Run Golub and Kahan's bidiagonalisation for S matrices at once, and derive quadrature rules that
bound quadratic forms of functions of AᵀA from both sides.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.estimate import Process, normalize_rows, orthogonalize

Rule = tuple[Tensor, Tensor]
"""Nodes and weights of a quadrature rule, (S, k) each, the largest node first."""


class Bidiagonal(Process):
    """The bidiagonalisation Aᵀ V = U B of each of S matrices A (P, N), from vectors z (N,).

    The first column of U is z/‖z‖. The process is that of Golub and Kahan 1965, in the form of
    Paige and Saunders 1982, section 3, with U kept orthonormal. B is lower bidiagonal, (k + 1) × k
    after k steps, with entries α on its diagonal and β below. It determines singular values σ of A
    to ε σmax with ε the precision, while T = BBᵀ of the Lanczos process determines eigenvalues
    λ = σ² to ε λmax only. A step costs two products.

    Args:
        operator: the S matrices A.
        start: (S, N) the vectors z, not zero.
    """

    def __init__(self, operator: LinearOperator, start: Float[Tensor, "S N"]) -> None:
        self.operator = operator
        self._inputs, self.start_norm = normalize_rows(start)
        self.basis = self._inputs[:, None]
        self._outputs, alpha = normalize_rows(operator.matvec(self._inputs))
        self._alphas = [alpha.double()]
        self._betas: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        """Return the number of steps taken, which is the number of columns of the bidiagonal B."""
        return len(self._betas)

    def step(self) -> None:
        """Take one step of two products, which adds a column to the bidiagonal matrix B, and
        computes the diagonal entry of the next one.
        """
        operator, alpha = self.operator, self._alphas[-1].to(self._inputs.dtype)
        image = operator.rmatvec(self._outputs) - alpha[:, None] * self._inputs
        fresh, beta = normalize_rows(orthogonalize(image, self.basis))
        # A remainder of a norm below this floor is rounding, whose direction has no meaning. Then
        # the Krylov space counts as exhausted.
        floor = torch.finfo(beta.dtype).eps * self._alphas[0].to(beta.dtype)
        full = torch.tensor(self.num_steps + 1 >= operator.num_inputs)
        exhausted = (beta <= floor) | full
        self._inputs = torch.where(exhausted[:, None], 0.0, fresh)
        beta = torch.where(exhausted, 0.0, beta)
        self._betas.append(beta.double())
        self.basis = torch.cat([self.basis, self._inputs[:, None]], dim=1)
        following = operator.matvec(self._inputs) - beta[:, None] * self._outputs
        self._outputs, alpha = normalize_rows(torch.where(exhausted[:, None], 0.0, following))
        self._alphas.append(alpha.double())

    @property
    def exhausted(self) -> Tensor:
        """Return booleans (S,), true for matrices whose Krylov space is exhausted, so that further
        steps change nothing.
        """
        return self._betas[-1] == 0

    def matrix(self) -> Float[Tensor, "S k1 k"]:
        """Return the lower bidiagonal matrices B (S, k + 1, k) after k steps, in float64."""
        return lower_bidiagonal(self._alphas[:-1], self._betas)

    def rules(self, order: int) -> tuple[Rule, Rule]:
        """Return Gauss' and Radau's quadrature rules for the measure λᵖμ, p = ``order``, 0 or 1.

        μ is the spectral measure of the start z: ∫f(λ) dμ = zᵀf(AᵀA)z. Each rule is a pair of nodes
        and weights (S, number of nodes). Radau's rule has a node at 0. The moments of μ follow from
        BBᵀ, and those of λμ from BᵀB.
        """
        bidiagonal = self.matrix()
        squared = self.start_norm.double()[:, None].cpu() ** 2
        if order == 0:
            square = bidiagonal[:, :-1]
            return _rule(square.mT, squared), _rule(bidiagonal.mT, squared)
        squared = squared * bidiagonal[:, 0, :1] ** 2
        return column_rules(bidiagonal, self._alphas[-1].cpu(), squared)


def lower_bidiagonal(diagonal: list[Tensor], below: list[Tensor]) -> Float[Tensor, "S k1 k"]:
    """Return lower bidiagonal matrices B (S, k + 1, k) in float64, from the k entries on the
    diagonal and the k entries below it, each (S,).
    """
    steps = len(diagonal)
    result = torch.zeros(diagonal[0].shape[0], steps + 1, steps, dtype=torch.float64)
    index = torch.arange(steps)
    result[:, index, index] = torch.stack(diagonal, 1).double().cpu()
    result[:, index + 1, index] = torch.stack(below, 1).double().cpu()
    return result


def column_rules(
    bidiagonal: Float[Tensor, "S k1 k"],
    next_alpha: Float[Tensor, " S"],
    mass: Float[Tensor, "S 1"],
) -> tuple[Rule, Rule]:
    """Return the quadrature rules of Gauss and of Radau for a measure that BᵀB describes.

    Each rule is a pair of nodes and weights (S, number of nodes). Gauss' rule gives the integral of
    g as m e₁ᵀ g(BᵀB) e₁, with the measure's ``mass`` m and the first unit vector e₁. Radau's has a
    node at 0. If the derivatives of g alternate in sign, the rules are a lower and an upper bound
    (Golub and Meurant 1994, section 4). Radau's rule comes from the upper bidiagonal factor R of B
    = QR with one more column. B's next column, of the diagonal entry ``next_alpha``, gives the
    entry above the diagonal; the entry on the diagonal is zero.
    """
    factor = torch.linalg.qr(bidiagonal, mode="r").R
    pivot, coupling = factor[:, -1, -1], next_alpha.double() * bidiagonal[:, -1, -1]
    column = torch.zeros_like(factor[:, :, :1])
    column[:, -1, 0] = torch.where(pivot == 0, 0.0, coupling / torch.where(pivot == 0, 1.0, pivot))
    return _rule(bidiagonal, mass), _rule(torch.cat([factor, column], dim=2), mass)


def _rule(matrix: Float[Tensor, "S r k"], mass: Float[Tensor, "S 1"]) -> Rule:
    """Return the quadrature rule that integrates g as m e₁ᵀ g(MᵀM) e₁ for matrices M (S, r, k): its
    nodes are the eigenvalues of MᵀM, its weights m times the squared first entries of the
    eigenvectors, each (S, k). ``mass`` is m.
    """
    _, values, vectors = torch.linalg.svd(matrix, full_matrices=True)
    missing = matrix.shape[2] - values.shape[1]
    nodes = torch.nn.functional.pad(values**2, (0, max(0, missing)))
    return nodes, mass * vectors[:, :, 0] ** 2


class Bidiagonalization(Process):
    """The bidiagonalisation A V = U B of each of S matrices A (P, N), from vectors b (P,).

    B is lower bidiagonal, (k + 1) × k after k steps, and V is kept orthonormal. The process is that
    of Golub and Kahan 1965, as in LSQR (Paige and Saunders 1982, section 3). A step costs two
    products, and the start one.

    Args:
        operator: the S matrices A.
        right_hand_side: (S, P) the vectors b.

    Attributes:
        blocks: (S,) the index of each matrix in the operator that was first given; ``narrow``
            leaves some out.
        scale: (S,) ‖b‖.
        basis: (S, k, N) the columns of V.
        alpha: (S,) the diagonal entry of B's next column.
        exhausted: (S,) whether the Krylov space is exhausted, so that the next vectors are zero.
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
        """Return the number of steps taken, which is the number of columns of the bidiagonal B."""
        return len(self.diagonal)

    def step(self, last: bool = False) -> None:
        """Take one step, which adds a column to the bidiagonal matrix B; an error is raised if the
        operator's budget does not allow it. If it is the ``last`` one, the second product, which
        prepares the next, is left out.
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

    def matrix(self) -> Float[Tensor, "S k1 k"]:
        """Return the lower bidiagonal matrices B (S, k + 1, k) after k steps, in float64."""
        return lower_bidiagonal(self.diagonal, self.below)
