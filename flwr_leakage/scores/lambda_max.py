"""λmax of JJᵀ: the steepest curvature of an L2 attack, by Lanczos."""

from dataclasses import dataclass

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore, numbers_of


@dataclass(frozen=True)
class LambdaMax(SampleScore):
    """λmax of JJᵀ, J = ∇ₓ∇_θL ∈ R^{N×P} (Hong et al. 2024, theorem 3: the L2 LAVP).

    JJᵀ is the Hessian of ½‖∇_θL(x') − g‖² at x' = x; Hong et al. read a large λmax as a loss that
    is hard to descend: larger is safer. In I_lb = ‖Jδ‖/λmax the same number stands in the
    denominator and a larger one is *less* safe; the two papers answer different questions. Lanczos
    with full reorthogonalisation finds it in about ten products of JJᵀ.

    Attributes:
        tolerance: largest relative error bound; the error itself is usually much smaller.
        max_steps: most products of JJᵀ; without convergence there is no number.
    """

    tolerance: float = 1e-2
    max_steps: int = 60

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``lambda_max``."""
        found = problem.largest(self.tolerance, self.max_steps)
        values, notes, errors, states = numbers_of(found.estimate, "at least")
        return [Column("lambda_max", values, "1", "larger is safer", notes, errors, states)]
