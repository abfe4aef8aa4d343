"""Compute the largest curvature λmax of an L2 attack's loss at the true input, by Lanczos."""

from dataclasses import dataclass

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore, numbers_of


@dataclass(frozen=True)
class LambdaMax(SampleScore):
    """A score: the largest eigenvalue λmax of JJᵀ (Hong et al. 2024, theorem 3: the L2 LAVP).

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of a sample's gradient, and JJᵀ is the Hessian of the L2
    attack's loss ½‖∇_θL(x') − g‖² at the true x' = x. Hong et al. argue that an attack with a large
    λmax descends badly: larger is safer. In the bound I_lb = ‖Jδ‖/λmax of Zhang et al. (2023), λmax
    is the denominator, so that a larger one is *less* safe. The first paper is about an attack's
    convergence, the second about the effect of noise. Lanczos with full reorthogonalisation finds
    λmax in about ten products with JJᵀ.

    Attributes:
        tolerance: the largest relative error bound; the error itself is usually much smaller.
        max_steps: the largest number of products with JJᵀ; without convergence there is no number.
    """

    tolerance: float = 1e-2
    max_steps: int = 60

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``lambda_max``: the largest eigenvalue of JJᵀ, with J the Jacobian of
        each sample's gradient.
        """
        found = problem.largest(self.tolerance, self.max_steps)
        numbers = numbers_of(found.estimate, "at least")
        return [numbers.column("lambda_max", "1", "larger is safer")]
