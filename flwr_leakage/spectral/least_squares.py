"""Solve least-squares problems without damping, by the SVD of the dense matrix in float64."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator


@dataclass(frozen=True)
class DenseSolution:
    """The shortest least-squares solutions x = A⁺b of S problems, one for each matrix A (P, N).

    Attributes:
        solutions: (S, N) solutions x.
        errors: (S,) the largest error of ‖x‖ that rounding in the products with A may cause.
        rank: (S,) number of singular values of A that count as not zero.
        inverse_diagonal: (S, N) diagonal of (AᵀA)⁺, which holds the variances of x if b has noise
            of variance 1.
    """

    solutions: Float[Tensor, "S N"]
    errors: Float[Tensor, " S"]
    rank: Int[Tensor, " S"]
    inverse_diagonal: Float[Tensor, "S N"]


def solve_dense(
    operator: LinearOperator, right_hand_side: Float[Tensor, "S P"], cutoff: float = 1e-12
) -> DenseSolution:
    """Return the shortest least-squares solutions A⁺b of S problems with vectors b (P,), from A =
    QR, formed by N products, and the SVD of R in float64. Singular values up to ``cutoff`` times
    the largest count as zero.
    """
    first = operator.products
    found = [
        _solve(matrix.double(), b.double(), cutoff, rounding)
        for matrix, b, rounding in zip(
            operator.to_dense(), right_hand_side, operator.rounding.tolist(), strict=True
        )
    ]
    assert operator.products - first == operator.num_inputs
    solutions, errors, ranks, diagonals = zip(*found, strict=True)
    return DenseSolution(
        torch.stack(solutions), torch.stack(errors), torch.stack(ranks), torch.stack(diagonals)
    )


def _solve(
    matrix: Tensor, b: Tensor, cutoff: float, rounding: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, triangle = torch.linalg.qr(matrix)
    u, sigma, vh = torch.linalg.svd(triangle, full_matrices=False)
    counted = (sigma > cutoff * sigma[0]) & (sigma > 0)
    inverse = torch.where(counted, 1 / sigma, 0.0)
    along = u.T @ (q.T @ b)
    slack = rounding * sigma[0]
    worst = torch.where(counted, 1 / (sigma - slack).clamp_min(1e-300), 0.0)
    error = (worst * along).norm() - (inverse * along).norm()
    diagonal = ((inverse[:, None] * vh) ** 2).sum(0)
    return vh.T @ (inverse * along), error, counted.sum(), diagonal
