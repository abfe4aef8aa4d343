"""Conjugate gradients for the damped normal equations, of S operators at once."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator


def conjugate_gradient(
    operator: LinearOperator,
    right_hand_side: Float[Tensor, "S N"],
    damping: Float[Tensor, " S"],
    tolerance: float = 1e-6,
    max_steps: int = 300,
) -> tuple[Float[Tensor, "S N"], Bool[Tensor, " S"], Float[Tensor, " S"], int]:
    """Solve (AᵀA + εI)x = b from x = 0 (Hestenes and Stiefel 1952).

    Needs no stored basis, in contrast to LSQR with reorthogonalisation, and more steps where
    ε is small.

    Args:
        operator: A, of S blocks.
        right_hand_side: b, (S, N).
        damping: ε > 0, (S,).
        tolerance: of ‖b − (AᵀA + εI)x‖/‖b‖.
        max_steps: of two products each.

    Returns:
        x (S, N), converged (S,), relative residuals (S,), and the products spent on each.
    """
    first = operator.products
    solution = torch.zeros_like(right_hand_side)
    residual = right_hand_side.clone()
    direction = residual
    squared = (residual**2).sum(1)
    target = tolerance**2 * squared
    initial = squared.clone()
    for _ in range(max_steps):
        active = squared > target
        if not bool(active.any()):
            break
        image = operator.gram(direction) + damping[:, None] * direction
        curvature = (direction * image).sum(1)
        step = torch.where(active, squared / torch.where(active, curvature, 1.0), 0.0)
        solution = solution + step[:, None] * direction
        residual = residual - step[:, None] * image
        updated = (residual**2).sum(1)
        ratio = torch.where(active, updated / torch.where(active, squared, 1.0), 0.0)
        direction = residual + ratio[:, None] * direction
        squared = torch.where(active, updated, squared)
    relative = (squared / torch.where(initial > 0, initial, 1.0)).sqrt()
    return solution, squared <= target, relative, operator.products - first
