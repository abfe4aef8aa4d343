"""Compute the inversion influence I²F with an absolute damping, as in its paper."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import UNDEFENDED, Column, SampleScore, first_notes, notes_where
from flwr_leakage.spectral import solve_damped


@dataclass(frozen=True)
class AbsoluteInfluence(SampleScore):
    """A score: the inversion influence ‖(JJᵀ + εI)⁻¹Jδ‖ with a damping ε in units of λ.

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, λ are the
    eigenvalues of JJᵀ, and δ is the perturbation of the sample's gradient. This is the extension to
    a singular J by Zhang et al. (2023, section 4). There ε is a hyperparameter, chosen so that
    attacks' errors are linear in I²F: 1 to 10 on LeNet and MNIST. As λ scales with the square of
    the loss, the same ε damps another share of the spectrum on every model. ``InversionInfluence``
    therefore takes ε/λmax instead.

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
        count, unit = len(problem), "model input"
        names = [f"absolute_influence_rmse_{damping:.0e}" for damping in self.dampings]
        if bool(problem.undefended.all()):
            zeros, notes = torch.zeros(count, dtype=torch.float64), [UNDEFENDED] * count
            exact: list[State] = ["exact"] * count
            return [
                Column(name, zeros, unit, "larger is safer", notes, zeros, exact) for name in names
            ]
        # Relative to a λmax of 1, the dampings are absolute.
        solved = solve_damped(
            problem.operator,
            problem.deltas,
            tuple(self.dampings),
            self.tolerance,
            self.max_steps,
            largest=torch.ones(count, dtype=torch.float64),
        )
        columns = []
        root = problem.operator.num_inputs**0.5
        for index, name in enumerate(names):
            done, norms = solved.converged[:, index], solved.norms[:, index] / root
            least = (solved.lower_bounds[:, index] / root).tolist()
            missed = [
                "" if sure else f"unresolved: at least {value:.3g} after {self.max_steps} steps"
                for sure, value in zip(done.tolist(), least, strict=True)
            ]
            notes = first_notes(notes_where(problem.undefended, UNDEFENDED), missed)
            states: list[State] = [
                "within tolerance" if sure else "lower bound" for sure in done.tolist()
            ]
            values = torch.where(done, norms, torch.nan)
            bars = values * self.tolerance
            columns.append(Column(name, values, unit, "larger is safer", notes, bars, states))
        return columns
