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
    SampleScore,
    first_notes,
    notes_where,
)
from flwr_leakage.scores.eigenvalue_mean import fits
from flwr_leakage.spectral import solve_damped
from flwr_leakage.spectral.dense import dense_bytes
from flwr_leakage.spectral.least_squares import solve_dense

_NO_DAMPING = 1e-14


@dataclass(frozen=True)
class UndampedInfluence(SampleScore):
    """A score: the inversion influence ‖(JJᵀ)⁻¹Jδ‖/√N without damping.

    J ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, and δ the defense's
    perturbation of that gradient (Zhang et al. 2023, equation 4).

    It is computed exactly from the SVD of the dense Jacobian, if N and the memory allow. If J lacks
    rank it is ‖(Jᵀ)⁺δ‖/√N, a lower bound of the error, as the update reveals nothing about
    directions d with Jᵀd = 0. Without the dense Jacobian, LSQR runs until its iterates stop
    growing; if it is stopped before, the result is a lower bound.

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

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes of one sample's dense Jacobian if it is to be formed, else 0."""
        if not fits(num_inputs, num_parameters, self.max_dense_inputs, self.memory_bytes):
            return 0
        return dense_bytes(num_inputs, num_parameters, torch.float64)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``undamped_influence_rmse``."""
        count = len(problem)
        unhidden = notes_where(problem.undefended, UNDEFENDED)
        if bool(problem.undefended.all()):
            zeros = torch.zeros(count, dtype=torch.float64)
            return [self._column(zeros, unhidden, zeros, ["exact"] * count)]
        operator = problem.operator
        size = (operator.num_inputs, operator.num_outputs)
        root = operator.num_inputs**0.5
        if fits(*size, self.max_dense_inputs, self.memory_bytes):
            dense = solve_dense(operator, problem.deltas, self.rank_cutoff)
            lacking = [
                FLAT
                if rank == 0
                else ""
                if rank == size[0]
                else f"at least this: J has rank "
                f"{rank} of {size[0]}, and δ along the rest is not seen"
                for rank in dense.rank.tolist()
            ]
            states: list[State] = [
                "unresolved" if rank == 0 else "exact" if rank == size[0] else "lower bound"
                for rank in dense.rank.tolist()
            ]
            values = torch.where(dense.rank > 0, dense.solutions.norm(dim=1), torch.nan)
            notes = first_notes(unhidden, lacking)
            return [self._column(values / root, notes, dense.errors / root, states)]
        solved = solve_damped(
            operator, problem.deltas, (_NO_DAMPING,), self.tolerance, self.max_steps
        )
        done, norms = solved.converged[:, 0], solved.norms[:, 0] / root
        least = (solved.lower_bounds[:, 0] / root).tolist()
        missed = [
            "" if sure else f"unresolved: at least {value:.3g} after {self.max_steps} steps"
            for sure, value in zip(done.tolist(), least, strict=True)
        ]
        states = ["within tolerance" if sure else "lower bound" for sure in done.tolist()]
        values = torch.where(done, norms, torch.nan)
        return [
            self._column(values, first_notes(unhidden, missed), values * self.tolerance, states)
        ]

    def _column(
        self, values: torch.Tensor, notes: list[str], errors: torch.Tensor, states: list[State]
    ) -> Column:
        name = "undamped_influence_rmse"
        return Column(name, values, "model input", "larger is safer", notes, errors, states)
