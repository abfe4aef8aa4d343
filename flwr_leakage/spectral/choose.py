"""The smallest eigenvalue by the cheapest route that resolves it within a memory budget."""

import torch

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.dense import (
    dense_bytes,
    dense_spectrum,
    estimate_of,
    gram_bytes,
    gram_spectrum,
)
from flwr_leakage.spectral.estimate import Estimate
from flwr_leakage.spectral.lanczos import smallest_eigenvalue


def choose_smallest_eigenvalue(
    operator: LinearOperator,
    generator: torch.Generator,
    tolerance: float = 1e-2,
    max_steps: int = 300,
    max_dense_inputs: int = 4096,
    memory_bytes: int = 2 * 1024**3,
) -> Estimate:
    """λmin of AᵀA; ``method`` of the result says which route it took.

    By size, conditioning and memory: where the dense matrix fits and N products are no more
    than Lanczos may take, the dense SVD at once. Else Lanczos; and for what it does not
    resolve, the dense SVD if it fits, or the float64 Gram matrix, which needs N² numbers
    only but resolves λmax/λmin to about 1e13 at a tolerance of 1 %, or nothing: the value is
    then an upper bound, and not marked as converged.

    Args:
        operator: A, of S blocks.
        generator: for Lanczos.
        tolerance: relative.
        max_steps: of Lanczos, of two products each.
        max_dense_inputs: N above which no dense route is taken, however much memory there is.
        memory_bytes: for a dense route.
    """
    small = operator.num_inputs <= max_dense_inputs
    dense_fits = small and dense_bytes(operator) <= memory_bytes
    first = operator.products
    if not (dense_fits and operator.num_inputs <= 2 * max_steps):
        estimate = smallest_eigenvalue(operator, generator, tolerance, max_steps).estimate
        gram_fits = operator.dtype == torch.float64 and gram_bytes(operator) <= memory_bytes
        if bool(estimate.converged.all()) or not (dense_fits or (small and gram_fits)):
            reason = "" if dense_fits or bool(estimate.converged.all()) else _reason(small)
            method = estimate.method + reason
            return Estimate(
                estimate.value, estimate.converged, estimate.residual, estimate.products, method
            )
    squared = not dense_fits
    spectrum = gram_spectrum(operator) if squared else dense_spectrum(operator)
    return estimate_of(spectrum, -1, tolerance, operator.products - first, operator, squared)


def _reason(small: bool) -> str:
    return "; too little memory for the dense route" if small else "; too large for a dense route"
