"""Define the common base of scores of the largest and the smallest eigenvalue."""

from dataclasses import dataclass, field

from flwr_leakage.per_sample import Precision
from flwr_leakage.scores.base import SampleScore
from flwr_leakage.scores.lavp import LAVP


@dataclass(frozen=True)
class ExtremesScore(SampleScore):
    """A score that is made of λmax and, on demand, λmin of JJᵀ.

    Attributes:
        smallest: whether to compute λmin and what needs it, which is dear (see ``LAVP``).
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
        """Return the memory of the dense route to λmin, for one sample."""
        return self.extremes().extra_bytes(num_inputs, num_parameters)

    def extremes(self) -> LAVP:
        """Return the score that measures λmax, and λmin after it."""
        return LAVP(
            ("lambda_max", "lambda_min") if self.smallest else ("lambda_max",),
            self.tolerance,
            self.min_tolerance,
            self.max_steps,
            self.max_dense_inputs,
            precision=self.precision,
            memory_bytes=self.memory_bytes,
        )
