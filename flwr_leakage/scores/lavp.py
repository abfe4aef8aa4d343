"""Compute LAVP: the curvature of an attack's loss at the true sample, for L2 and cosine losses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from flwr_leakage.operators import AngularJacobian, LinearOperator
from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import (
    Column,
    Numbers,
    SampleScore,
    first_notes,
    notes_where,
    numbers_of,
    states_of,
)
from flwr_leakage.spectral import choose_smallest_eigenvalue, largest_eigenvalue, route_bytes

Quantity = Literal["lambda_max", "lambda_min", "angular_max", "angular_min", "lavp_fusion"]


@dataclass(frozen=True)
class LAVP(SampleScore):
    """A score: the loss-aware vulnerability proxies (LAVP) of Hong et al. (2024).

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of a sample's gradient g. The quantities are:

    - ``lambda_max``, ``lambda_min``: the extreme eigenvalues of JJᵀ, the Hessian of an L2 attack's
      loss at the truth (theorem 3, whose J is the transpose);
    - ``angular_max``, ``angular_min``: the extreme eigenvalues of (JJᵀ − (Jg)(Jg)ᵀ/‖g‖²)/‖g‖², the
      Hessian of a cosine attack's loss (theorem 4);
    - ``lavp_fusion``: √(``lambda_max`` · ``angular_min``) (Table 3).

    In the paper's reading a sample with a larger value is harder to attack, hence safer. The maxima
    cost about ten products with JJᵀ. The minima are expensive: hundreds of products, or the dense
    Jacobian. If neither resolves a minimum, there is no number, and the note has a bound.

    Attributes:
        quantities: the quantities to compute, in this order.
        tolerance: the relative error to which the maxima are computed.
        min_tolerance: the relative error to which the minima are computed.
        max_steps: the largest number of steps of a Lanczos run.
        max_dense_inputs: the largest N for which the dense Jacobian may be formed for the minima.
        precision: the floating-point type of all computations; the minima need ``float64``.
    """

    quantities: Sequence[str] = get_args(Quantity)
    tolerance: float = 1e-2
    min_tolerance: float = 1e-2
    max_steps: int = 300
    max_dense_inputs: int = 4096
    precision: Precision = field(default="float64", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantities", tuple(self.quantities))
        unknown = set(self.quantities) - set(get_args(Quantity))
        if unknown or not self.quantities:
            raise ValueError(f"quantities must be from {get_args(Quantity)}, got {self.quantities}")

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes of one sample's dense Jacobian if a minimum needs it, else 0."""
        if {*self.quantities} <= {"lambda_max", "angular_max"}:
            return 0
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        return route_bytes(
            num_inputs, num_parameters, dtype, self.max_dense_inputs, self.memory_bytes
        )

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return a column for each of ``quantities``, such as ``lambda_max``, in their order."""
        known: dict[str, Numbers] = {}
        return [
            self._find(name, problem, known).column(name, "1", "larger is safer")
            for name in self.quantities
        ]

    def _find(self, name: str, problem: SampleProblem, known: dict[str, Numbers]) -> Numbers:
        if name not in known:
            known[name] = self._compute(name, problem, known)
        return known[name]

    def _compute(self, name: str, problem: SampleProblem, known: dict[str, Numbers]) -> Numbers:
        if name == "lavp_fusion":
            return _geometric_mean(
                self._find("lambda_max", problem, known), self._find("angular_min", problem, known)
            )
        if name == "lambda_max":
            top = problem.largest(self.tolerance, self.max_steps)
            return numbers_of(top.estimate, "at least")
        if name == "lambda_min":
            return self._smallest(problem, problem.operator)
        operator, notes = angular_operator(problem)
        if name == "angular_min":
            found = self._smallest(problem, operator)
        else:
            start = problem.start(self.tolerance)
            pairs = largest_eigenvalue(operator, start, self.tolerance, self.max_steps)
            found = numbers_of(pairs.estimate, "at least")
        directed = torch.tensor([not note for note in notes])
        states: list[State] = [
            "unresolved" if note else state for note, state in zip(notes, found.states, strict=True)
        ]
        values = torch.where(directed, found.values, torch.nan)
        # If the projection I − ĝĝᵀ, with ĝ = g/‖g‖, removes nearly all of J, the result consists of
        # J's rounding errors. So the error bar grows with the removed part.
        slips = 2 * problem.rounding * operator.removed.double() * values.sqrt()
        return Numbers(values, first_notes(notes, found.notes), found.errors + slips, states)

    def _smallest(self, problem: SampleProblem, operator: LinearOperator) -> Numbers:
        # The start vector is drawn anew from the problem's seed, so that a minimum does not depend
        # on whether others are computed.
        estimate = choose_smallest_eigenvalue(
            operator,
            problem.generators(problem.seed),
            self.min_tolerance,
            self.max_steps,
            self.max_dense_inputs,
            self.memory_bytes,
        )
        return numbers_of(estimate, "at most")


def _geometric_mean(left: Numbers, right: Numbers) -> Numbers:
    """Return √(ab) of two quantities a and b for each sample, NaN where either has no number."""
    values = (left.values * right.values).sqrt()
    relative = left.errors / left.values + right.errors / right.values
    notes, states = first_notes(left.notes, right.notes), states_of(values, "within tolerance")
    return Numbers(values, notes, values * relative / 2, states)


def angular_operator(problem: SampleProblem) -> tuple[AngularJacobian, list[str]]:
    """Return the Jacobian of each sample's gradient direction g/‖g‖ by the input, and for each
    sample a note, which is empty unless g = 0.
    """
    zero = (problem.gradients == 0).all(1)
    # A zero gradient has no direction. A vector of ones replaces it, and the note excludes the
    # sample.
    stand_in = torch.where(zero[:, None], 1.0, problem.gradients)
    notes = notes_where(zero, "the gradient is zero: it has no direction")
    return AngularJacobian(problem.operator, stand_in), notes
