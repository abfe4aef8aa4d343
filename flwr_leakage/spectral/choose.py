"""The smallest eigenvalue by the cheapest route that resolves it within a memory budget."""

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
    """Return the most memory in bytes that ``choose_smallest_eigenvalue`` takes for one block.

    The memory of the operator itself is not counted.
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
    """Return λmin of AᵀA; ``method`` of the result names the last route.

    The route depends on size, conditioning and memory:

    - If the dense matrix fits, and its N products are no more than Lanczos may take, it is the
      dense SVD.
    - Otherwise it is Lanczos. Blocks that Lanczos does not resolve get the dense SVD if that fits,
      else the Gram matrix in float64 if that fits. The Gram matrix needs N² numbers only, and
      resolves λmax/λmin up to about 1e13 at a tolerance of 1 %.
    - If no route resolves λmin, the value is an upper bound, and not marked as converged.

    Args:
        operator: the operators A, of S blocks.
        generator: draws the start of Lanczos.
        tolerance: relative error of λmin.
        max_steps: largest number of steps of Lanczos, of two products each.
        max_dense_inputs: N above which no dense route is taken, with any memory.
        memory_bytes: memory for a dense route of one block. The dense routes of all S blocks run at
            once, so that the caller must pass as many blocks as fit; see ``route_bytes``. The route
            of a block, and with it its value, then does not depend on the other blocks.
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
            reason = "" if resolved else _reason(small)
            return replace(iterated, method=iterated.method + reason)
    squared = not dense_fits
    known = torch.zeros(operator.num_blocks, dtype=torch.bool)
    known = known if iterated is None else iterated.converged.cpu()
    # Blocks that Lanczos resolved need no dense route.
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


def _reason(small: bool) -> str:
    return "; too little memory for the dense route" if small else "; too large for a dense route"
