"""Define the base class of scores of the extreme singular values of a sample's Jacobian."""

from dataclasses import dataclass, field

from flwr_leakage.per_sample import Precision
from flwr_leakage.scores.base import SampleScore
from flwr_leakage.scores.lavp import LAVP


@dataclass(frozen=True)
class ExtremesScore(SampleScore):
    """A base class of scores computed from λmax and, if ``smallest`` is set, λmin of JJᵀ.

    J ∈ R^{N×P} is the Jacobian of a sample's gradient.

    Attributes:
        smallest: whether to compute λmin and the quantities that need it, which is expensive.
        tolerance: the relative error to which λmax is computed.
        min_tolerance: the relative error to which λmin is computed.
        max_steps: the largest number of steps of a Lanczos run.
        max_dense_inputs: the largest number N of inputs for which λmin may be computed from the
            dense Jacobian.
    """

    smallest: bool = True
    tolerance: float = 1e-2
    min_tolerance: float = 1e-2
    max_steps: int = 300
    max_dense_inputs: int = 4096
    precision: Precision = field(default="float64", kw_only=True)

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes of one sample's dense Jacobian if λmin is computed by it, else 0."""
        return self.extremes().extra_bytes(num_inputs, num_parameters)

    def extremes(self) -> LAVP:
        """Return the score that measures the largest eigenvalue λmax of JJᵀ and, if ``smallest`` is
        set, after it the smallest one λmin; J is the Jacobian of a sample's gradient.
        """
        return LAVP(
            ("lambda_max", "lambda_min") if self.smallest else ("lambda_max",),
            self.tolerance,
            self.min_tolerance,
            self.max_steps,
            self.max_dense_inputs,
            precision=self.precision,
            memory_bytes=self.memory_bytes,
        )
