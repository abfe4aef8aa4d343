"""LAVP: curvature of the attacker's loss at the truth, for L2 and cosine attacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import AngularJacobian, LinearOperator
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    SampleProblem,
    from_estimate,
    measurement,
    sample_problems,
)
from flwr_leakage.spectral import choose_smallest_eigenvalue, largest_eigenvalue

Quantity = Literal["lambda_max", "lambda_min", "angular_max", "angular_min", "lavp_fusion"]
Column = tuple[list[float | None], list[str]]


@dataclass(frozen=True)
class LAVP:
    """Loss-aware vulnerability proxies (Hong et al. 2024), J = ∇ₓ∇_θL ∈ R^{N×P}.

    - ``lambda_max``, ``lambda_min``: of JJᵀ, the Hessian of an L2 attack's loss at the truth;
    - ``angular_max``, ``angular_min``: of (JJᵀ − (Jg)(Jg)ᵀ/‖g‖²)/‖g‖², that of a cosine
      attack's loss;
    - ``lavp_fusion``: √(λmax · ang_min).

    Larger is harder to attack, hence safer, in the paper's reading. The maxima cost about ten
    products of JJᵀ. The minima are dear: hundreds of products, or the dense Jacobian; where
    neither resolves them there is no number but a bound in the note.

    Attributes:
        quantities: which ones, in this order.
        tolerance: of the maxima.
        min_tolerance: of the minima.
        max_steps: of a Lanczos run.
        max_dense_inputs: N above which the dense route is not taken.
        point: see ``sample_problems``.
        precision: see ``sample_problems``; the minima need ``float64``.
        memory_bytes: for the graphs, and for the dense route.
    """

    quantities: Sequence[str] = get_args(Quantity)
    tolerance: float = 1e-2
    min_tolerance: float = 1e-2
    max_steps: int = 300
    max_dense_inputs: int = 4096
    point: Point = "defended"
    precision: Precision = "float64"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantities", tuple(self.quantities))
        unknown = set(self.quantities) - set(get_args(Quantity))
        if unknown or not self.quantities:
            raise ValueError(f"quantities must be from {get_args(Quantity)}, got {self.quantities}")

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """One measurement for each quantity."""
        columns: dict[str, Column] = {name: ([], []) for name in self.quantities}
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            known: dict[str, Column] = {}
            for name in self.quantities:
                values, notes = self._column(name, problem, generator, known)
                columns[name][0].extend(values)
                columns[name][1].extend(notes)
            products += (problem.operator.products - before) * len(problem.notes)
        return [
            measurement(name, values, notes, "1", "larger is safer", products if i == 0 else 0)
            for i, (name, (values, notes)) in enumerate(columns.items())
        ]

    def _column(
        self,
        name: str,
        problem: SampleProblem,
        generator: torch.Generator,
        known: dict[str, Column],
    ) -> Column:
        if name in known:
            return known[name]
        if name == "lavp_fusion":
            tops, top_notes = self._column("lambda_max", problem, generator, known)
            bottoms, bottom_notes = self._column("angular_min", problem, generator, known)
            values = [
                None if top is None or bottom is None else (top * bottom) ** 0.5
                for top, bottom in zip(tops, bottoms, strict=True)
            ]
            notes = [a or b for a, b in zip(top_notes, bottom_notes, strict=True)]
            known[name] = (values, notes)
            return known[name]
        if name == "lambda_max":
            pairs = problem.largest(generator, self.tolerance, self.max_steps)
            known[name] = from_estimate(problem, pairs.estimate, bound="at least")
            return known[name]
        operator: LinearOperator = problem.operator
        notes = list(problem.notes)
        if name.startswith("angular"):
            operator, notes = angular_operator(problem)
        known[name] = self._extreme(name.endswith("max"), problem, operator, notes, generator)
        return known[name]

    def _extreme(
        self,
        largest: bool,
        problem: SampleProblem,
        operator: LinearOperator,
        notes: list[str],
        generator: torch.Generator,
    ) -> Column:
        if largest:
            start = problem.start(generator, self.tolerance)
            estimate = largest_eigenvalue(operator, start, self.tolerance, self.max_steps).estimate
        else:
            estimate = choose_smallest_eigenvalue(
                operator,
                generator,
                self.min_tolerance,
                self.max_steps,
                self.max_dense_inputs,
                self.memory_bytes,
            )
        bound = "at least" if largest else "at most"
        values, remarks = from_estimate(problem, estimate, bound)
        for sample, note in enumerate(notes):
            if note:
                values[sample], remarks[sample] = None, note
        return values, remarks


def angular_operator(problem: SampleProblem) -> tuple[LinearOperator, list[str]]:
    """The Jacobian of each gradient's direction, and why a sample has none."""
    zero = (problem.gradients == 0).all(1)
    # A zero gradient has no direction; any stands in, and the sample is left out by its note.
    stand_in = torch.where(zero[:, None], 1.0, problem.gradients)
    notes = [
        note or ("the gradient is zero: it has no direction" if bare else "")
        for note, bare in zip(problem.notes, zero.tolist(), strict=True)
    ]
    return AngularJacobian(problem.operator, stand_in), notes
