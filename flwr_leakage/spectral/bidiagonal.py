"""Golub–Kahan bidiagonalisation of S operators at once, and quadrature rules that bracket."""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.estimate import normalize_rows, orthogonalize

Rule = tuple[Tensor, Tensor]
"""Nodes and weights of a quadrature rule, (S, k) each, the largest node first."""


class Bidiagonal:
    """The bidiagonalisation Aᵀ V = U B of A from a vector z of inputs, with u₁ = z/‖z‖.

    The process is that of Golub and Kahan 1965, in the form of Paige and Saunders 1982, section 3,
    with U kept orthonormal. B is lower bidiagonal, (k + 1) × k after k steps, with α on its
    diagonal and β below. It determines σ to ε σmax with ε the precision, while T = BBᵀ of the
    Lanczos process determines λ = σ² to ε λmax only. A step costs two products.

    Args:
        operator: the operators A, of S blocks.
        start: (S, N) vectors z, not zero.
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
        """Return the number of steps taken, which is the number of columns of B."""
        return len(self._betas)

    def step(self) -> None:
        """Extend B by one column, and take α of the next one."""
        operator, alpha = self.operator, self._alphas[-1].to(self._inputs.dtype)
        image = operator.rmatvec(self._outputs) - alpha[:, None] * self._inputs
        fresh, beta = normalize_rows(orthogonalize(image, self.basis))
        # A remainder below this is rounding, and its direction has no meaning.
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

    def narrow(self, rows: Int[Tensor, " R"]) -> "Bidiagonal":
        """Return the process of some blocks, which continues from here without the others."""
        other = copy.copy(self)
        other.operator = self.operator.narrow(rows)
        for name in ("_inputs", "start_norm", "basis", "_outputs"):
            setattr(other, name, getattr(self, name)[rows])
        other._alphas = [entry[rows] for entry in self._alphas]
        other._betas = [entry[rows] for entry in self._betas]
        return other

    @property
    def exhausted(self) -> Tensor:
        """Return (S,) whether the Krylov space is complete."""
        return self._betas[-1] == 0

    def matrix(self) -> Float[Tensor, "S k1 k"]:
        """Return B."""
        return lower_bidiagonal(self._alphas[:-1], self._betas)

    def rules(self, order: int) -> tuple[Rule, Rule]:
        """Return Gauss' and Radau's rules, the latter with a node at 0, of the measure λᵖμ.

        μ is the spectral measure of z: ∫f dμ = zᵀf(AᵀA)z. Its moments follow from BBᵀ, those of λμ
        from BᵀB.

        Args:
            order: the power p, 0 or 1.
        """
        bidiagonal = self.matrix()
        squared = self.start_norm.double()[:, None].cpu() ** 2
        if order == 0:
            square = bidiagonal[:, :-1]
            return _rule(square.mT, squared), _rule(bidiagonal.mT, squared)
        squared = squared * bidiagonal[:, 0, :1] ** 2
        return column_rules(bidiagonal, self._alphas[-1].cpu(), squared)


def lower_bidiagonal(diagonal: list[Tensor], below: list[Tensor]) -> Float[Tensor, "S k1 k"]:
    """Return B from its diagonal and the diagonal below, with entries (S,), in float64."""
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
    """Return Gauss' and Radau's rules of BᵀB at its first unit vector; Radau's has a node at 0.

    For g whose derivatives alternate in sign, Gauss' rule is a lower bound and Radau's an upper one
    (Golub and Meurant 1994, section 4). Radau's comes from the upper bidiagonal factor R of BᵀB
    with one more column, whose entry below is zero.

    Args:
        bidiagonal: (S, k + 1, k) the matrix B.
        next_alpha: (S,) the diagonal entry that B's next column would have.
        mass: (S, 1) mass of the measure.
    """
    factor = torch.linalg.qr(bidiagonal, mode="r").R
    pivot, coupling = factor[:, -1, -1], next_alpha.double() * bidiagonal[:, -1, -1]
    column = torch.zeros_like(factor[:, :, :1])
    column[:, -1, 0] = torch.where(pivot == 0, 0.0, coupling / torch.where(pivot == 0, 1.0, pivot))
    return _rule(bidiagonal, mass), _rule(torch.cat([factor, column], dim=2), mass)


def _rule(matrix: Float[Tensor, "S r k"], mass: Float[Tensor, "S 1"]) -> Rule:
    """Return the nodes and weights of MᵀM at its first unit vector."""
    _, values, vectors = torch.linalg.svd(matrix, full_matrices=True)
    missing = matrix.shape[2] - values.shape[1]
    nodes = torch.nn.functional.pad(values**2, (0, max(0, missing)))
    return nodes, mass * vectors[:, :, 0] ** 2


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
        """Return the number of steps taken, which is the number of columns of B."""
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
