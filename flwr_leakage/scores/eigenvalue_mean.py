"""Average a function over the squared singular values of a sample's Jacobian.

The mean is exact if the Jacobian is formed, and a lower bound otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor

from flwr_leakage.operators import LinearOperator
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.scores.base import SampleScore
from flwr_leakage.spectral import Lanczos
from flwr_leakage.spectral.dense import dense_bytes, dense_spectrum

ROUNDING = 1e-15
"""The ratio λ/λmax below which an eigenvalue λ of JJᵀ, computed in float64 from a Jacobian J,
consists of rounding errors alone."""


@dataclass(frozen=True)
class EigenvalueMean:
    """The mean of a function f over the N eigenvalues λ of JJᵀ, for each of S samples, with J the
    Jacobian of a sample's gradient by its N inputs.

    Attributes:
        values: (S,) the means.
        errors: (S,) half the width of each mean's error bar: the rounding error if ``exact``, else
            the sampling error of the random vectors at 99 % confidence.
        exact: whether the means come from the dense Jacobian J. If not, they are lower bounds up to
            the sampling error.
        rank: (S,) the number of eigenvalues above ``(rank_cutoff)² λmax``; −1 where it is not
            known.
        largest: (S,) the largest eigenvalue λmax; a lower bound of it if not ``exact``.
    """

    values: Float[Tensor, " S"]
    errors: Float[Tensor, " S"]
    exact: bool
    rank: Int[Tensor, " S"]
    largest: Float[Tensor, " S"]


def fits(num_inputs: int, num_parameters: int, max_dense_inputs: int, memory_bytes: int) -> bool:
    """Return whether the dense Jacobian of a sample may be formed: its N inputs are at most
    ``max_dense_inputs``, and N rows of P parameters fit into ``memory_bytes``.
    """
    needed = dense_bytes(num_inputs, num_parameters, torch.float64)
    return num_inputs <= max_dense_inputs and needed <= memory_bytes


class DenseScore(SampleScore):
    """A base class of scores that form a sample's dense Jacobian if it is small enough."""

    max_dense_inputs: int

    def is_dense(self, operator: LinearOperator) -> bool:
        """Return whether the Jacobians of the samples, which ``operator`` multiplies with vectors,
        are to be formed as dense matrices.
        """
        size = (operator.num_inputs, operator.num_outputs)
        return fits(*size, self.max_dense_inputs, self.memory_bytes)

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes of one sample's dense Jacobian if it is to be formed, else 0."""
        if not fits(num_inputs, num_parameters, self.max_dense_inputs, self.memory_bytes):
            return 0
        return dense_bytes(num_inputs, num_parameters, torch.float64)


def eigenvalue_mean(
    problem: SampleProblem,
    function: Callable[[Tensor], Tensor],
    draws: Draws,
    dense: bool,
    num_probes: int,
    max_steps: int,
    rank_cutoff: float = 1e-12,
) -> EigenvalueMean:
    """Return the mean of f(λ) over the N eigenvalues λ of JJᵀ, for a completely monotone function
    f.

    Such functions are 1/λ and 1/(λ + c). J is the Jacobian of a sample's gradient. Without the
    dense J, Lanczos quadrature estimates the mean by random vectors z. As all even derivatives of f
    are positive, Gauss quadrature is a lower bound of zᵀf(JJᵀ)z after any number of steps (Golub
    and Meurant 1994, theorem 3.1). Quadrature nodes that are too small by rounding are raised,
    which lowers f and so keeps the bound.

    Args:
        problem: the S samples with their Jacobians, in float64.
        function: f, applied to eigenvalues (S, k).
        draws: the random generators of the vectors z.
        dense: whether to form J, and compute the mean exactly.
        num_probes: the number of random vectors z.
        max_steps: the largest number of Lanczos steps for each z.
        rank_cutoff: singular values of J below this share of the largest count as zero.
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
    # The variance is estimated from few probes, so that Student's t gives the quantile.
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
    """Return zᵀf(JJᵀ)z/N (n, S) by Gauss' rule for n = ``num_probes`` vectors z of random signs
    from ``draws``, and a lower bound of λmax (S,). J are the samples' Jacobians, f is applied to
    eigenvalues (S, k), and ``max_steps`` limits the Lanczos steps for each z.
    """
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
