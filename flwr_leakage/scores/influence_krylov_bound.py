"""Bound the inversion influence (I²F) from below by a few steps of LSQR."""

from dataclasses import dataclass

import torch

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.scores.base import (
    FLAT,
    UNDEFENDED,
    Column,
    SampleScore,
    first_notes,
    notes_where,
)
from flwr_leakage.spectral import least_squares_growth

NOT_FINITE = "δ, the released minus the raw update, is not finite: look for NaN in the batch"
ROUNDING_FACTOR = 32
"""An upper limit of the ratio of the relative rounding error of ‖x_k‖, with x_k the k-th LSQR
iterate, to that of products with the Jacobian J. On ten networks in float32 the worst relative
error was 2.6e-6, with error bars up to 1.1e-3 (``simulations/benchmarks/results/scores.md``)."""


@dataclass(frozen=True)
class InfluenceKrylovBound(SampleScore):
    """A score: a lower bound ‖x_k‖ of the undamped inversion influence ‖(JJᵀ)⁻¹Jδ‖ (I²F).

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, δ (P,) is the
    defense's perturbation of that gradient, and x_k is the k-th iterate of LSQR from zero on ``min
    ‖Jᵀx − δ‖``. The norms of the iterates grow towards that of the least-squares solution (Paige
    and Saunders 1982), which is the I²F. On LeNet eight steps reach about a quarter of it, while
    the lower bound I_lb = ‖Jδ‖/λmax in closed form reaches a thousandth. The eight steps rank
    samples as attacks do (Spearman .6 under equal noise). I_lb and an I²F with a damping of 1e-3
    λmax rank them in the opposite order, as damping removes just the directions in which samples
    differ. The quantities are:

    - ``influence_krylov_bound_rmse``: ‖x_k‖/√N for the sample's share of the released δ;
    - ``unit_noise_influence_bound_rmse``, only if δ = 0: the same number for one draw of Gaussian
      noise of standard deviation 1 on every entry of the sample's gradient. By it the samples of an
      undefended client can be compared.

    Attributes:
        num_steps: the number k of LSQR steps, of two Jacobian products each.
    """

    num_steps: int = 8

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return a column of the bound for the defense's perturbation of each sample's gradient.

        If δ = 0 for all samples, there is also the column for one draw of unit noise.
        """
        known = problem.deltas.isfinite().all(1)
        hidden = not bool(problem.undefended.all())
        if hidden:
            # LSQR runs on all samples together, so that a δ that is not finite must be replaced by
            # zeros.
            deltas = torch.where(known[:, None], problem.deltas, 0.0)
        else:
            deltas = normal_rows(problem.deltas.shape, draws).to(problem.deltas)
        norms, largest = least_squares_growth(problem.operator, deltas, self.num_steps)
        length = norms / problem.operator.num_inputs**0.5
        bound = torch.where(known & (largest > 0), length, torch.nan)
        reasons = first_notes(notes_where(~known, NOT_FINITE), notes_where(largest == 0, FLAT))
        name, unit = "influence_krylov_bound_rmse", "model input"
        # The iterates of a few steps depend on large singular values alone. Rounding changes these
        # least, so that a fixed factor bounds the rounding error of ‖x_k‖.
        errors = ROUNDING_FACTOR * problem.rounding * bound
        if hidden:
            return [Column(name, bound, unit, "larger is safer", reasons, errors, "lower bound")]
        recovered = first_notes(reasons, [UNDEFENDED] * len(problem))
        probe, probe_unit = "unit_noise_influence_bound_rmse", "model input per unit of noise"
        zeros = 0 * bound
        return [
            Column(name, zeros, unit, "larger is safer", recovered, zeros, "exact"),
            Column(probe, bound, probe_unit, "larger is safer", reasons, errors, "lower bound"),
        ]
