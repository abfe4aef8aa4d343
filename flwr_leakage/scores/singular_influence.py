"""Compute the influence of a perturbation along a singular direction of J."""

from dataclasses import dataclass

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, first_notes, notes_where
from flwr_leakage.scores.extremes import ExtremesScore

_TURNED: dict[State, State] = {"lower bound": "upper bound", "upper bound": "lower bound"}


@dataclass(frozen=True)
class SingularInfluence(ExtremesScore):
    """I²F of a unit δ along the first and the last right singular vector of J: 1/√λ.

    These are the least and the largest error that noise of norm 1 in the span of J can cause, so
    that a defense which is free to choose its direction should choose the last vector. (Zhang et
    al. 2023, section 5.1, print 1/λ, which is the *squared* error: JJᵀ has the eigenvalue λ, J the
    singular value √λ.)

    """

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``first_singular_influence`` and ``last_singular_influence``."""
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
            # The power turns bounds around.
            states = [_TURNED.get(state, state) for state in source.states]
            columns.append(Column(name, values, unit, "larger is safer", notes, errors, states))
        return columns
