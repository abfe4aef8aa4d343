"""Stochastic Lanczos quadrature: traces of functions of AᵀA."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.estimate import Estimate, remaining_growth
from flwr_leakage.spectral.lanczos import Lanczos

SpectralFunction = Callable[[Tensor, Tensor], Tensor]
"""(eigenvalues (S, k), λmax (S, 1)) ↦ (S, k)."""


@dataclass(frozen=True)
class Trace:
    """Σᵢf(λᵢ) with the spread over the probes.

    Attributes:
        estimate: value and relative error (quadrature error plus standard error).
        standard_error: (S,) of the mean over the probes, absolute; 0 for a single one.
        largest: (S,) the largest Ritz value over the probes.
    """

    estimate: Estimate
    standard_error: Float[Tensor, " S"]
    largest: Float[Tensor, " S"]


def spectral_sum(
    operator: LinearOperator,
    function: SpectralFunction,
    generator: torch.Generator,
    num_probes: int = 10,
    max_steps: int = 60,
    tolerance: float = 0.02,
) -> Trace:
    """Σᵢf(λᵢ) of AᵀA by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017, algorithm 2).

    For a random sign vector z, E[zᵀf(AᵀA)z] is the trace, and k steps of Lanczos from z give
    zᵀf(AᵀA)z ≈ N Σⱼ wⱼf(θⱼ) with Gauss nodes θⱼ and weights wⱼ = (first entry of T's
    eigenvector)². A probe stops when the last quarter of its steps changed its value by less
    than half the tolerance.

    Args:
        operator: A, of S blocks.
        function: f of the eigenvalues and of λmax, so that a damping may be relative to it.
        generator: for the probes.
        num_probes: z's.
        max_steps: Gram products for each probe at most.
        tolerance: relative; the value converged if quadrature and sampling error are below it.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}.")
    first = operator.products
    values: list[Tensor] = []
    largest = torch.zeros(operator.num_blocks, dtype=torch.float64)
    moved = torch.zeros(operator.num_blocks, dtype=torch.float64)
    for _ in range(num_probes):
        signs = torch.randint(0, 2, (operator.num_blocks, operator.num_inputs), generator=generator)
        start = (2 * signs - 1).to(dtype=operator.dtype, device=operator.device)
        value, change, top = _probe(operator, start, function, max_steps, tolerance)
        values.append(value)
        moved = torch.maximum(moved, change)
        largest = torch.maximum(largest, top)
    stacked = torch.stack(values)
    mean = stacked.mean(0)
    error = stacked.std(0) / num_probes**0.5 if num_probes > 1 else torch.zeros_like(mean)
    relative = moved + error / mean.abs().clamp_min(torch.finfo(mean.dtype).tiny)
    estimate = Estimate(
        mean,
        relative <= tolerance,
        relative,
        operator.products - first,
        f"stochastic Lanczos quadrature, {num_probes} probes",
    )
    return Trace(estimate, error, largest)


def _probe(
    operator: LinearOperator,
    start: Tensor,
    function: SpectralFunction,
    max_steps: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    process = Lanczos(operator, start)
    history: list[Tensor] = []
    while True:
        process.step()
        nodes, vectors = process.ritz()
        nodes = nodes.clamp_min(0)
        top = nodes[:, -1:]
        weights = vectors[:, 0] ** 2
        history.append(operator.num_inputs * (weights * function(nodes, top)).sum(1).cpu())
        value, steps = history[-1], len(history)
        change = remaining_growth(history)
        if bool((process.last_beta == 0).all()):
            change = torch.zeros_like(value)
        limit = min(max_steps, operator.num_inputs)
        if steps >= limit or bool((change <= tolerance / 2).all()):
            return value, change, top[:, 0].cpu()
