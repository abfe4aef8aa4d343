"""Compute the inversion influence I²F with an absolute damping, as in its paper."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore, damped_norms, nothing_hidden
from flwr_leakage.spectral import solve_damped


@dataclass(frozen=True)
class AbsoluteInfluence(SampleScore):
    """A score: the inversion influence ‖(JJᵀ + εI)⁻¹Jδ‖ with an absolute damping ε.

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, λ are the
    eigenvalues of JJᵀ, and δ is the perturbation of the sample's gradient. Zhang et al. (2023,
    section 4) extend I²F by ε to a singular J. Their ε is a hyperparameter in the units of λ,
    chosen so that attacks' errors are linear in I²F: 1 to 10 on LeNet and MNIST. As λ scales with
    the square of the loss, the same ε damps a different share of the spectrum on every model.
    ``InversionInfluence`` therefore takes ε/λmax instead.

    The quantities ``absolute_influence_rmse_…``, one for each ε, are the norm divided by √N.

    Attributes:
        dampings: the values of ε, > 0.
        tolerance: the relative error to which I²F is computed.
        max_steps: the largest number of LSQR steps, of two Jacobian products each.
    """

    dampings: Sequence[float] = (1.0,)
    tolerance: float = 1e-2
    max_steps: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "dampings", tuple(self.dampings))
        if not self.dampings or min(self.dampings) <= 0:
            raise ValueError(f"dampings must be positive, got {self.dampings}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return a column ``absolute_influence_rmse_…`` for each damping."""
        names = [f"absolute_influence_rmse_{damping:.0e}" for damping in self.dampings]
        if bool(problem.undefended.all()):
            found = [nothing_hidden(problem)] * len(names)
        else:
            # The solver multiplies each damping by a given λmax. With λmax = 1, dampings are
            # absolute.
            ones = torch.ones(len(problem), dtype=torch.float64)
            limits = (self.tolerance, self.max_steps)
            dampings = tuple(self.dampings)
            solved = solve_damped(problem.operator, problem.deltas, dampings, *limits, ones)
            found = [damped_norms(problem, solved, i, *limits) for i in range(len(names))]
        return [
            numbers.column(name, "model input", "larger is safer")
            for name, numbers in zip(names, found, strict=True)
        ]
