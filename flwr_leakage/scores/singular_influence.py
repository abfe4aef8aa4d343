"""Compute the inversion influence of perturbations along a Jacobian's extreme singular vectors."""

from dataclasses import dataclass

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, first_notes, notes_where
from flwr_leakage.scores.extremes import ExtremesScore

_TURNED: dict[State, State] = {"lower bound": "upper bound", "upper bound": "lower bound"}


@dataclass(frozen=True)
class SingularInfluence(ExtremesScore):
    """A score: the inversion influence 1/√λ of a unit perturbation along a singular vector of J.

    J is the Jacobian of a sample's gradient, and λ the eigenvalue of JJᵀ for the first and for the
    last right singular vector of J.

    The two values are the least and the largest reconstruction error that noise of norm 1 in the
    row space of J can cause. So a defense that is free to choose the noise's direction should
    choose the last vector. (Zhang et al. 2023, section 5.1, print 1/λ, which is the *squared*
    error: JJᵀ has the eigenvalue λ, J the singular value √λ.)
    """

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``first_singular_influence``, 1/√λ for the largest eigenvalue λ of
        JJᵀ with a sample's Jacobian J, and ``last_singular_influence``, that for the smallest.
        """
        columns = []
        for name, source in zip(
            ("first_singular_influence", "last_singular_influence"),
            self.extremes().measure(problem, draws),
            strict=False,
        ):
            notes = first_notes(notes_where(source.values == 0, FLAT), source.notes)
            unit = "model input per unit of gradient"
            values = source.values**-0.5
            errors = None if source.errors is None else values * source.errors / source.values / 2
            # 1/√λ decreases with λ, so that an upper bound of λ gives a lower bound of 1/√λ, and
            # vice versa.
            states = [_TURNED.get(state, state) for state in source.own_states]
            columns.append(Column(name, values, unit, "larger is safer", notes, errors, states))
        return columns
