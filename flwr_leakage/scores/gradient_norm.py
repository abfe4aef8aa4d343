"""Measure the norm of each sample's gradient."""

from dataclasses import dataclass

from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore


@dataclass(frozen=True)
class GradientNorm(SampleScore):
    """A score: the norm ‖g‖ = ‖∇_θL(x, y)‖ of a sample's gradient, the baseline of other scores.

    The norm says nothing about the Jacobian of the gradient. Noise of a fixed strength hides a
    larger gradient less. The score costs one gradient and no Jacobian product.
    """

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``gradient_norm``: the norm of each sample's gradient."""
        norms = row_norms(problem.gradients).double()
        errors = norms * problem.rounding
        return [Column("gradient_norm", norms, "1", "larger leaks more", (), errors, "exact")]
