"""Compute the smallest eigenvalue of AᵀA by the cheapest method that resolves it: Lanczos, the SVD
of A, or the eigenvalues of AᵀA.
"""

from dataclasses import replace

import torch

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws
from flwr_leakage.spectral.dense import (
    dense_bytes,
    dense_spectrum,
    estimate_of,
    gram_bytes,
    gram_spectrum,
)
from flwr_leakage.spectral.estimate import Estimate
from flwr_leakage.spectral.smallest import smallest_eigenvalue


def route_bytes(
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    max_dense_inputs: int,
    memory_bytes: int,
) -> int:
    """Return the most bytes that ``choose_smallest_eigenvalue`` takes for one matrix A (P, N),
    without the operator itself; 0 if no dense method fits, so that only Lanczos is left.

    Args:
        num_inputs: N.
        num_outputs: P.
        dtype: the precision of A.
        max_dense_inputs: the largest N for which a dense method is used.
        memory_bytes: the memory that a dense method may take.
    """
    if num_inputs > max_dense_inputs:
        return 0
    for needed in (dense_bytes(num_inputs, num_outputs, dtype), gram_bytes(num_inputs)):
        if needed <= memory_bytes:
            return needed
    return 0


def choose_smallest_eigenvalue(
    operator: LinearOperator,
    generator: Draws,
    tolerance: float = 1e-2,
    max_steps: int = 300,
    max_dense_inputs: int = 4096,
    memory_bytes: int = 2 * 1024**3,
) -> Estimate:
    """Return the smallest eigenvalue λmin of AᵀA for each of S matrices A (P, N).

    The method depends on size, conditioning and memory:

    - If the dense matrix A fits into memory, and its N products are no more than Lanczos may take,
      it is the SVD of A.
    - Otherwise it is Lanczos. Matrices for which Lanczos does not resolve λmin get the SVD of A if
      that fits, else the eigenvalues of AᵀA in float64 if that fits. AᵀA needs N² numbers only, and
      resolves λmax/λmin up to about 1e13 at a tolerance of 1 %.
    - If no method resolves λmin, the value is an upper bound, and not marked as converged.

    ``method`` of the result names the last method that was used.

    Args:
        operator: the S matrices A.
        generator: the generator of Lanczos's random start.
        tolerance: relative error of λmin.
        max_steps: largest number of steps of Lanczos, of two products each.
        max_dense_inputs: N above which no dense method is used, with any memory.
        memory_bytes: memory that a dense method may take for one matrix. As all S are treated at
            once, the caller must pass no more of them than fit; see ``route_bytes``.
    """
    small = operator.num_inputs <= max_dense_inputs
    one = dense_bytes(operator.num_inputs, operator.num_outputs, operator.dtype)
    dense_fits = small and one <= memory_bytes
    first = operator.products
    iterated = None
    if not (dense_fits and operator.num_inputs <= 2 * max_steps):
        iterated = smallest_eigenvalue(operator, generator, tolerance, max_steps).estimate
        gram_fits = operator.dtype == torch.float64
        gram_fits &= gram_bytes(operator.num_inputs) <= memory_bytes
        if bool(iterated.converged.all()) or not (dense_fits or (small and gram_fits)):
            resolved = dense_fits or bool(iterated.converged.all())
            lack = "too little memory for the dense" if small else "too large for a dense"
            reason = "" if resolved else f"; {lack} route"
            return replace(iterated, method=iterated.method + reason)
    squared = not dense_fits
    known = torch.zeros(operator.num_blocks, dtype=torch.bool)
    known = known if iterated is None else iterated.converged.cpu()
    # Matrices whose λmin Lanczos resolved need no dense method.
    rest = (~known).nonzero()[:, 0]
    left = operator if len(rest) == len(known) else operator.narrow(rest)
    spectrum = gram_spectrum(left) if squared else dense_spectrum(left)
    spent = operator.products - first
    direct = estimate_of(spectrum, -1, tolerance, spent, left, squared)
    if iterated is None or len(rest) == len(known):
        return direct
    value, converged = iterated.value.clone(), iterated.converged.clone()
    residual = iterated.residual.clone()
    value[rest], converged[rest] = direct.value, direct.converged
    residual[rest] = direct.residual
    return Estimate(value, converged, residual, spent, direct.method)
