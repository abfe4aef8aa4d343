"""Stochastic Lanczos quadrature: traces of functions of AᵀA."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.spectral.estimate import Estimate, keep_finished, remaining_growth
from flwr_leakage.spectral.lanczos import Lanczos

SpectralFunction = Callable[[Tensor, Tensor], Tensor]
"""(eigenvalues (S, k), λmax (S, 1)) ↦ (S, k)."""


@dataclass(frozen=True)
class Trace:
    """An estimate of Σᵢf(λᵢ), the mean over random probes.

    Attributes:
        estimate: its value, and its relative error (quadrature error plus standard error).
        standard_error: (S,) absolute standard error of the mean; 0 for a single probe.
        largest: (S,) the largest Ritz value over the probes.
    """

    estimate: Estimate
    standard_error: Float[Tensor, " S"]
    largest: Float[Tensor, " S"]


def spectral_sum(
    operator: LinearOperator,
    function: SpectralFunction,
    generator: Draws,
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
        function: f of the eigenvalues, which is given λmax too, so that a damping may be relative
            to it.
        generator: for the probes.
        num_probes: how many vectors z are drawn.
        max_steps: most Gram products for each probe.
        tolerance: the value has converged if its relative error is below this.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}.")
    first = operator.products
    values: list[Tensor] = []
    largest = torch.zeros(operator.num_blocks, dtype=torch.float64)
    moved = torch.zeros(operator.num_blocks, dtype=torch.float64)
    for _ in range(num_probes):
        signs = sign_rows((operator.num_blocks, operator.num_inputs), generator)
        start = signs.to(dtype=operator.dtype, device=operator.device)
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
    finished = torch.zeros(operator.num_blocks, dtype=torch.bool)
    value = change = top = None
    while True:
        process.step()
        nodes, vectors = process.ritz()
        nodes = nodes.clamp_min(0)
        weights = vectors[:, 0] ** 2
        history.append(
            operator.num_inputs * (weights * function(nodes, nodes[:, -1:])).sum(1).cpu()
        )
        growth = torch.where(process.last_beta.cpu() == 0, 0.0, remaining_growth(history))
        value = keep_finished(finished, value, history[-1])
        change = keep_finished(finished, change, growth)
        top = keep_finished(finished, top, nodes[:, -1].cpu())
        finished = finished | (growth <= tolerance / 2)
        if bool(finished.all()) or len(history) >= min(max_steps, operator.num_inputs):
            return value, change, top
