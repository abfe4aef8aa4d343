"""Compute the inversion influence without damping: a perfect attacker's reconstruction error."""

from dataclasses import dataclass, field

import torch

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import (
    FLAT,
    UNDEFENDED,
    Column,
    Numbers,
    damped_norms,
    first_notes,
    notes_where,
    nothing_hidden,
)
from flwr_leakage.scores.eigenvalue_mean import DenseScore
from flwr_leakage.spectral import solve_damped
from flwr_leakage.spectral.least_squares import solve_dense

_NO_DAMPING = 1e-14


@dataclass(frozen=True)
class UndampedInfluence(DenseScore):
    """A score: the inversion influence ‖(JJᵀ)⁻¹Jδ‖/√N without damping.

    J ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, and δ the defense's
    perturbation of that gradient (Zhang et al. 2023, equation 4).

    It is computed exactly from the SVD of the dense Jacobian, if N and the memory allow. If J lacks
    rank it is ‖(Jᵀ)⁺δ‖/√N, a lower bound of the error, as the update reveals nothing about
    directions d with Jᵀd = 0. Without the dense Jacobian, LSQR runs until the norm of its iterates
    stops growing. If ``max_steps`` end it before, the result is a lower bound.

    Attributes:
        max_dense_inputs: the largest N for which J is formed.
        rank_cutoff: singular values below this share of the largest count as zero.
        tolerance: the relative error of LSQR's result.
        max_steps: the largest number of LSQR steps, of two products each.
    """

    max_dense_inputs: int = 1024
    rank_cutoff: float = 1e-12
    tolerance: float = 1e-2
    max_steps: int = 1000
    precision: Precision = field(default="float64", kw_only=True)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``undamped_influence_rmse``, in model input units."""
        found = self._influence(problem)
        return [found.column("undamped_influence_rmse", "model input", "larger is safer")]

    def _influence(self, problem: SampleProblem) -> Numbers:
        if bool(problem.undefended.all()):
            return nothing_hidden(problem)
        operator = problem.operator
        size, root = operator.num_inputs, operator.num_inputs**0.5
        if self.is_dense(operator):
            dense = solve_dense(operator, problem.deltas, self.rank_cutoff)
            lacking = [
                FLAT
                if rank == 0
                else ""
                if rank == size
                else f"at least this: J has rank {rank} of {size}, and δ along the rest is not seen"
                for rank in dense.rank.tolist()
            ]
            states: list[State] = [
                "unresolved" if rank == 0 else "exact" if rank == size else "lower bound"
                for rank in dense.rank.tolist()
            ]
            values = torch.where(dense.rank > 0, dense.solutions.norm(dim=1), torch.nan)
            notes = first_notes(notes_where(problem.undefended, UNDEFENDED), lacking)
            return Numbers(values / root, notes, dense.errors / root, states)
        limits = (self.tolerance, self.max_steps)
        solved = solve_damped(operator, problem.deltas, (_NO_DAMPING,), *limits)
        return damped_norms(problem, solved, 0, *limits)
