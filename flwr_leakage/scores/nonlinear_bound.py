"""Estimate a lower bound of the inversion influence for perturbations that are not small."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem, Samples
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.scores.base import UNDEFENDED, Column, SampleScore, notes_where
from flwr_leakage.spectral import largest_eigenvalue, random_start


@dataclass(frozen=True)
class NonlinearBound(SampleScore):
    """A score: the lower bound ‖Jδ‖/(μ_L‖J‖ + 2μ_J‖g + δ‖) of an attacker's error.

    J ∈ R^{N×P} is the Jacobian of a sample's gradient g, and δ the defense's perturbation of g
    (Zhang et al. 2023, theorem 3.1).

    μ_L and μ_J are Lipschitz constants of the gradient map x ↦ g(x) and of x ↦ J(x). Both are
    estimated from random points at distance ``radius``: μ_L = max(‖J‖, maxₙ‖g(x + n) − g(x)‖/‖n‖)
    and μ_J = maxₙ‖J(x + n) − J(x)‖₂/‖n‖, where Lanczos computes the norm of the difference. A
    maximum over a few points lies below the true constant, so this is an *estimate* of the bound,
    not a certificate; and where ReLU makes J jump, μ_J grows without limit as the radius shrinks.

    Attributes:
        radius: the distance ‖n‖ as an RMS per input entry, in the units of the inputs.
        num_draws: the number of random points.
        tolerance: the relative error to which spectral norms are computed.
        max_steps: the largest number of steps of a Lanczos run.
    """

    radius: float = 1e-2
    num_draws: int = 3
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.radius <= 0 or self.num_draws < 1:
            raise ValueError(
                f"radius must be positive and num_draws at least 1, got {self.radius}, "
                f"{self.num_draws}."
            )

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``nonlinear_influence_bound``, in model input units."""
        top = problem.largest(self.tolerance, self.max_steps).estimate
        norm = top.value.clamp_min(0).sqrt()
        mu_gradient, mu_jacobian = curvature(
            problem, norm, draws, self.radius, self.num_draws, self.tolerance, self.max_steps
        )
        projected = row_norms(problem.operator.rmatvec(problem.deltas)).double()
        released = row_norms(problem.gradients + problem.deltas).double()
        bound = projected / (mu_gradient * norm + 2 * mu_jacobian * released)
        notes = notes_where(problem.undefended, UNDEFENDED)
        # The constants μ are maxima over draws, and so too small. As the bound divides by them, the
        # number may be larger than the theorem's bound, and has the state ``upper bound``.
        errors = bound * (top.residual + self.tolerance + 32 * problem.rounding)
        name, unit = "nonlinear_influence_bound", "model input"
        return [Column(name, bound, unit, "larger is safer", notes, errors, "upper bound")]


def curvature(
    problem: SampleProblem,
    norm: Float[Tensor, " S"],
    draws: Draws,
    radius: float,
    num_draws: int,
    tolerance: float,
    max_steps: int,
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Return estimates from below, (S,) each, of the Lipschitz constants μ_L of x ↦ g(x), a
    sample's gradient, and μ_J of x ↦ J(x), its Jacobian. ``norm`` (S,) is ‖J‖. The points are
    ``num_draws`` draws at distance ``radius`` from x (an RMS per input entry). Spectral norms have
    the relative error ``tolerance``, or take ``max_steps`` Lanczos steps.
    """
    mu_gradient, mu_jacobian = norm, torch.zeros_like(norm)
    for _ in range(num_draws):
        noise = radius * normal_rows(problem.inputs.shape, draws).to(problem.inputs)
        length = row_norms(noise).double()

        def change(samples: Samples, shift: Tensor = noise) -> Tensor:
            moved = samples.with_inputs(samples.inputs + shift)
            return moved.gradients() - samples.gradients()

        difference = problem.jacobian_of(change)
        mu_gradient = torch.maximum(mu_gradient, row_norms(difference.value) / length)
        start = random_start(difference, draws)
        top = largest_eigenvalue(difference, start, tolerance, max_steps)
        steepest = top.estimate.value.clamp_min(0).sqrt() / length
        mu_jacobian = torch.maximum(mu_jacobian, steepest)
    return mu_gradient, mu_jacobian
