"""Compute I_lb, a lower bound of the inversion influence from two cheap quantities."""

from dataclasses import dataclass

import torch

from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import (
    FLAT,
    UNDEFENDED,
    Column,
    SampleScore,
    first_notes,
    notes_where,
    numbers_of,
    states_of,
)


@dataclass(frozen=True)
class InfluenceLowerBound(SampleScore):
    """I_lb = ‖Jδ‖/λmax(JJᵀ) ≤ I²F (Zhang et al. 2023, equation 5), J ∈ R^{N×P}.

    It is a valid bound of the undamped I²F, but a loose one: on LeNet it lies 16–48 times below the
    error that attacks reach, and within one noise level it may rank samples backwards. λmax is
    increased by its own error bound, so that an estimate from below does not spoil the bound.

    Attributes:
        tolerance: relative error to which λmax is computed.
        max_steps: most products of JJᵀ in the search for λmax.
    """

    tolerance: float = 1e-2
    max_steps: int = 60

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``influence_nominal`` (I_nom = ‖Jδ‖) and ``influence_lower_bound``."""
        nominal = row_norms(problem.operator.rmatvec(problem.deltas)).double()
        estimate = problem.largest(self.tolerance, self.max_steps).estimate
        top, unresolved, widths, _ = numbers_of(estimate, "at least", "λmax")
        bound = torch.where(top > 0, nominal / (top + widths), torch.nan)
        unhidden = notes_where(problem.undefended, UNDEFENDED)
        reach = estimate.value.sqrt() * row_norms(problem.deltas).double()
        slips = problem.rounding * reach
        errors = slips / (top + widths) + bound * 2 * estimate.residual
        notes = first_notes(unresolved, notes_where(top == 0, FLAT), unhidden)
        return [
            Column(
                "influence_nominal",
                nominal,
                "1",
                "larger is safer",
                unhidden,
                slips,
                states_of(nominal, "exact"),
            ),
            Column(
                "influence_lower_bound",
                bound,
                "model input",
                "larger is safer",
                notes,
                errors,
                states_of(bound, "lower bound"),
            ),
        ]
