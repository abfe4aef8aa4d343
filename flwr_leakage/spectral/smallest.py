"""Estimate the smallest eigenvalue of AᵀA for S matrices A at once, by the Lanczos process."""

import torch
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws
from flwr_leakage.spectral.estimate import Estimate
from flwr_leakage.spectral.lanczos import EigenPairs, Lanczos, random_start

RESOLVABLE_CONDITION = 1e7
"""Largest ratio λmax/λmin of eigenvalues of AᵀA at which a value of Lanczos with a random start is
accepted as λmin. At larger ratios λmin is not resolved in practice."""

SETTLING_STEPS = 30
"""Number of Lanczos steps up to which no Ritz value is accepted as the smallest eigenvalue λmin,
unless the Krylov space is exhausted. After fewer, a value near another eigenvalue may look
settled."""


def smallest_eigenvalue(
    operator: LinearOperator,
    generator: Draws,
    tolerance: float = 1e-2,
    max_steps: int = 300,
) -> EigenPairs:
    """Return the smallest eigenvalue λmin of AᵀA, or an upper bound marked as not converged.

    The smallest Ritz value, an eigenvalue of AᵀA in the Krylov space, never lies below λmin. A
    small residual shows only that it is near *an* eigenvalue. So it is taken for λmin in two cases:

    - The residual is small, λmax/λmin is below 1e7 (``RESOLVABLE_CONDITION``), there were more than
      30 steps (``SETTLING_STEPS``), and the value has not moved by more than the tolerance over the
      last third of them.
    - The Krylov space of the random start is exhausted, and λmin is above rounding.

    Args:
        operator: S matrices A.
        generator: the generator of the random start.
        tolerance: relative error of λmin.
        max_steps: largest number of steps, of one product with AᵀA each.

    Returns:
        The estimates, and their eigenvectors.
    """
    process = Lanczos(operator, random_start(operator, generator))
    first = operator.products
    rounding = 10 * torch.finfo(operator.dtype).eps
    history: list[Tensor] = []
    blocks = torch.arange(operator.num_blocks, device=operator.device)
    found: list[tuple[Tensor, ...]] = []
    while len(blocks):
        process.step()
        theta, vectors = process.ritz()
        lowest = theta[:, 0]
        history.append(lowest)
        scale = lowest.clamp_min(torch.finfo(lowest.dtype).tiny)
        residual = process.last_beta * vectors[:, -1, 0].abs() / scale
        moved = (history[2 * len(history) // 3] - lowest) / scale
        done = (residual <= tolerance) & (moved <= tolerance)
        done &= theta[:, -1] <= RESOLVABLE_CONDITION * lowest
        done &= torch.tensor(process.num_steps > SETTLING_STEPS)
        done |= (process.last_beta == 0) & (rounding * theta[:, -1] <= tolerance * lowest)
        last = process.num_steps >= min(max_steps, operator.num_inputs)
        leaving = done | torch.tensor(last)
        if bool(leaving.any()):
            # Rounding moves each eigenvalue of Lanczos's tridiagonal matrix by up to the precision
            # times the largest one. So the relative error of the smallest grows with their ratio,
            # the condition.
            conditions = theta[:, -1] / scale
            own = process.operator.rounding.to(scale)
            error = residual + moved + rounding * conditions + 2 * own * conditions.sqrt()
            # A matrix that has its result takes no part in further steps.
            weights = vectors[leaving, :, 0].to(operator.dtype)
            pairs = torch.einsum("sk,skn->sn", weights, process.basis[leaving])
            value = lowest[leaving].clamp_min(0)
            found.append((blocks[leaving], value, done[leaving], error[leaving], pairs))
            rest = (~leaving).nonzero()[:, 0]
            blocks, history = blocks[rest], [entry[rest] for entry in history]
            process = process.narrow(rest)
    order, *parts = (torch.cat(column) for column in zip(*found, strict=True))
    value, finished, error, eigenvectors = (part[order.argsort()] for part in parts)
    estimate = Estimate(value, finished, error, operator.products - first, "Lanczos")
    return EigenPairs(estimate, eigenvectors)
