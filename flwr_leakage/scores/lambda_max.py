"""λmax of JJᵀ: the steepest curvature of an L2 attack, by Lanczos."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    from_estimate,
    measurement,
    sample_problems,
)


@dataclass(frozen=True)
class LambdaMax:
    """λmax of JJᵀ, J = ∇ₓ∇_θL ∈ R^{N×P} (Hong et al. 2024: the L2 LAVP).

    JJᵀ is the Hessian of ½‖∇_θL(x') − g‖² at x' = x; Hong et al. read a large λmax as a loss
    that is hard to descend: larger is safer. In I_lb = ‖Jδ‖/λmax the same number stands in the
    denominator and a larger one is *less* safe; the two papers answer different questions.
    By Lanczos with full reorthogonalisation, about ten products of JJᵀ.

    Attributes:
        tolerance: of the relative error bound; the error itself is usually much smaller.
        max_steps: products of JJᵀ at most; without convergence there is no number.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    tolerance: float = 1e-2
    max_steps: int = 60
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """One measurement, ``lambda_max``."""
        values: list[float | None] = []
        notes: list[str] = []
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            pairs = problem.largest(generator, self.tolerance, self.max_steps)
            found, remarks = from_estimate(problem, pairs.estimate, bound="at least")
            values += found
            notes += remarks
            products += (problem.operator.products - before) * len(problem.notes)
        return [measurement("lambda_max", values, notes, "1", "larger is safer", products)]
