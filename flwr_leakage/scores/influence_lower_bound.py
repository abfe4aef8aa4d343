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
)


@dataclass(frozen=True)
class InfluenceLowerBound(SampleScore):
    """A score: the lower bound I_lb = ‖Jδ‖/λmax(JJᵀ) of the inversion influence I²F.

    J ∈ R^{N×P} is the Jacobian of a sample's gradient, and δ the defense's perturbation of that
    gradient (Zhang et al. 2023, equation 5).

    It is a valid bound of the undamped I²F, but a loose one: on LeNet it lies 16–48 times below the
    error that attacks reach, and among samples under equal noise it may rank them backwards.
    Lanczos estimates λmax from below. So its error bound is added to it, by which I_lb remains a
    bound.

    Attributes:
        tolerance: the relative error to which λmax is computed.
        max_steps: the largest number of products with JJᵀ in the search for λmax.
    """

    tolerance: float = 1e-2
    max_steps: int = 60

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``influence_nominal`` (‖Jδ‖) and ``influence_lower_bound``.

        J is a sample's Jacobian, and δ the defense's perturbation of its gradient.
        """
        nominal = row_norms(problem.operator.rmatvec(problem.deltas)).double()
        estimate = problem.largest(self.tolerance, self.max_steps).estimate
        top, unresolved, widths, _ = numbers_of(estimate, "at least", "λmax")
        bound = torch.where(top > 0, nominal / (top + widths), torch.nan)
        unhidden = notes_where(problem.undefended, UNDEFENDED)
        reach = estimate.value.sqrt() * row_norms(problem.deltas).double()
        slips = problem.rounding * reach
        errors = slips / (top + widths) + bound * 2 * estimate.residual
        name = "influence_lower_bound"
        notes = first_notes(unresolved, notes_where(top == 0, FLAT), unhidden)
        return [
            Column("influence_nominal", nominal, "1", "larger is safer", unhidden, slips, "exact"),
            Column(name, bound, "model input", "larger is safer", notes, errors, "lower bound"),
        ]
