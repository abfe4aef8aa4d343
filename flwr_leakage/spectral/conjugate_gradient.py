"""Solve a positive definite linear system by conjugate gradients, from products with its matrix."""

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    tolerance: float,
    max_iterations: int,
    precondition: Callable[[Tensor], Tensor] = lambda vector: vector,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Tensor, int]:
    """Return the solution x (D,) of A x = b by preconditioned conjugate gradients (Hestenes,
    Stiefel 1952) from x = 0, and the number of iterations. If that is ``max_iterations``, or if
    ``is_over`` ended them, the tolerance may not have been reached.

    Args:
        product: the map v ↦ A v for flat v (D,), with A symmetric and positive definite.
        right: (D,) right-hand side b.
        tolerance: share of √(rᵀ P r) at x = 0 at which the iteration stops, with the residual
            r = b − A x and the preconditioner P.
        max_iterations: largest number of iterations, of one product each.
        precondition: the map v ↦ P v ≈ A⁻¹ v, with P symmetric and positive definite.
        is_over: a function that is asked after each iteration, and ends them by returning True.

    Example:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> conjugate_gradients(lambda v: matrix @ v, torch.tensor([3.0, 4.0]), 1e-6, 10)
        (tensor([1.0000, 1.0000]), 2)
    """
    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = precondition(residual)
    size = first = residual @ preconditioned
    iterations = 0
    while iterations < max_iterations and size > tolerance**2 * first:
        if iterations and is_over():
            break
        iterations += 1
        image = product(direction)
        length = size / (direction @ image)
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        previous, size = size, residual @ preconditioned
        direction = preconditioned + size / previous * direction
    return solution, iterations
