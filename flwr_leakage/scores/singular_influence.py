"""The influence of a perturbation along a singular direction of J."""

from dataclasses import dataclass, field

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, SampleScore, first_notes, notes_where
from flwr_leakage.scores.lavp import LAVP

_TURNED: dict[State, State] = {"lower bound": "upper bound", "upper bound": "lower bound"}


@dataclass(frozen=True)
class SingularInfluence(SampleScore):
    """I²F of a unit δ along the first and the last right singular vector of J: 1/√λ.

    The least and the most that noise of norm 1 in the span of J can do: a defense that is free
    to choose its direction should choose the last. (Zhang et al. 2023, section 4.2, print 1/λ,
    which is the *squared* error: JJᵀ has the eigenvalue λ, J the singular value √λ.)

    Attributes:
        smallest: whether to compute the last one, too, which is dear (see ``LAVP``).
        tolerance: relative error to which λmax is computed.
        min_tolerance: relative error to which λmin is computed.
        max_steps: most steps of a Lanczos run.
        max_dense_inputs: see ``LAVP``.
    """

    smallest: bool = True
    tolerance: float = 1e-2
    min_tolerance: float = 1e-2
    max_steps: int = 300
    max_dense_inputs: int = 4096
    precision: Precision = field(default="float64", kw_only=True)

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Memory of the dense route to λmin, for one sample."""
        return self._spectrum().extra_bytes(num_inputs, num_parameters)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """``first_singular_influence`` and ``last_singular_influence``."""
        columns = []
        for name, source in zip(
            ("first_singular_influence", "last_singular_influence"),
            self._spectrum().measure(problem, draws),
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

    def _spectrum(self) -> LAVP:
        return LAVP(
            ("lambda_max", "lambda_min") if self.smallest else ("lambda_max",),
            self.tolerance,
            self.min_tolerance,
            self.max_steps,
            self.max_dense_inputs,
            precision=self.precision,
            memory_bytes=self.memory_bytes,
        )
