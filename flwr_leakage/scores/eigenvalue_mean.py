"""Average over the eigenvalues of JJᵀ, exactly from the dense Jacobian, or as a lower bound."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.spectral import Lanczos
from flwr_leakage.spectral.dense import dense_bytes, dense_spectrum

ROUNDING = 1e-15
"""λ/λmax below which an eigenvalue of a float64 Gram product is rounding."""


@dataclass(frozen=True)
class EigenvalueMean:
    """The mean of f(λ) over the N eigenvalues of JJᵀ, for S samples.

    Attributes:
        values: (S,).
        errors: (S,) half widths of error bars: of rounding where exact, else of 99 % over the
            random probes.
        exact: whether it comes from the dense Jacobian; else it is a lower bound but for the
            sampling error.
        rank: (S,) eigenvalues above ``(rank_cutoff)² λmax``; −1 where not known.
        largest: (S,) λmax, from below where not exact.
    """

    values: Float[Tensor, " S"]
    errors: Float[Tensor, " S"]
    exact: bool
    rank: Int[Tensor, " S"]
    largest: Float[Tensor, " S"]


def fits(num_inputs: int, num_parameters: int, max_dense_inputs: int, memory_bytes: int) -> bool:
    """Return whether the dense route is taken."""
    needed = dense_bytes(num_inputs, num_parameters, torch.float64)
    return num_inputs <= max_dense_inputs and needed <= memory_bytes


def eigenvalue_mean(
    problem: SampleProblem,
    function: Callable[[Tensor], Tensor],
    draws: Draws,
    dense: bool,
    num_probes: int,
    max_steps: int,
    rank_cutoff: float = 1e-12,
) -> EigenvalueMean:
    """Return Σf(λ)/N for a completely monotone f, such as 1/λ or 1/(λ + c).

    Without the dense Jacobian, Lanczos quadrature estimates the mean. All even derivatives of such
    an f are positive, so that Gauss quadrature never exceeds zᵀf(JJᵀ)z, whatever the number of its
    steps (Golub and Meurant 1994, theorem 3.1): stopped early it is still a bound. Nodes that
    rounding makes too small are raised, which lowers f.

    Args:
        problem: the problem of the samples, in float64.
        function: f of eigenvalues (S, k).
        draws: the source of draws for the probes z.
        dense: whether to form J.
        num_probes: random z.
        max_steps: most steps of Lanczos for each.
        rank_cutoff: relative size of singular values that count as zero.
    """
    if dense:
        eigenvalues = dense_spectrum(problem.operator)
        values = function(eigenvalues).mean(1)
        slack = problem.operator.rounding[:, None] * eigenvalues[:, :1].sqrt()
        least = (eigenvalues.sqrt() - slack).clamp_min(0) ** 2
        errors = (function(least).mean(1) - values).abs()
        rank = (eigenvalues > rank_cutoff**2 * eigenvalues[:, :1]).sum(1)
        return EigenvalueMean(values, errors, True, rank, eigenvalues[:, 0])
    values, largest = _quadrature(problem, function, draws, num_probes, max_steps)
    unknown = torch.full((len(problem),), -1)
    # Few probes need Student's t.
    quantile = float(stdtrit(num_probes - 1, 0.995))
    width = quantile * values.std(0) / num_probes**0.5
    return EigenvalueMean(values.mean(0), width, False, unknown, largest)


def _quadrature(
    problem: SampleProblem,
    function: Callable[[Tensor], Tensor],
    draws: Draws,
    num_probes: int,
    max_steps: int,
) -> tuple[Float[Tensor, "n S"], Float[Tensor, " S"]]:
    """Return zᵀf(JJᵀ)z/N by Gauss' rule for each of n random signs z, and λmax from below."""
    operator = problem.operator
    largest = torch.zeros(len(problem), dtype=torch.float64)
    values = []
    for _ in range(num_probes):
        process = Lanczos(operator, sign_rows(problem.inputs.shape, draws).to(problem.inputs))
        for _ in range(min(max_steps, operator.num_inputs)):
            process.step()
            if bool((process.last_beta == 0).all()):
                break
        nodes, vectors = process.ritz()
        top = nodes[:, -1:].clamp_min(0)
        raised = torch.maximum(nodes, ROUNDING * top)
        values.append((vectors[:, 0] ** 2 * function(raised)).sum(1))
        largest = torch.maximum(largest, top[:, 0])
    return torch.stack(values), largest
