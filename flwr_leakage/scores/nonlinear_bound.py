"""The lower bound of Theorem 3.1 for perturbations that are not small."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import FunctionJacobian
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.inversion_influence import UNDEFENDED
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    SampleProblem,
    measurement,
    sample_problems,
)
from flwr_leakage.spectral import largest_eigenvalue, random_start


@dataclass(frozen=True)
class NonlinearBound:
    """‖Jδ‖/(μ_L‖J‖ + 2μ_J‖g + δ‖) (Zhang et al. 2023, theorem 3.1), J ∈ R^{N×P}.

    μ_L and μ_J are Lipschitz constants of the gradient map x ↦ g(x) and of x ↦ J(x). Both are
    estimated from random points at distance ``radius``: μ_L = max(‖J‖, maxₙ‖g(x + n) − g(x)‖/‖n‖)
    and μ_J = maxₙ‖J(x + n) − J(x)‖₂/‖n‖, the latter by Lanczos on the difference. A maximum over
    a few points lies below the true constant, so this is an *estimate* of the bound, not a
    certificate; and where ReLU makes J jump, μ_J grows without limit as the radius shrinks.

    Attributes:
        radius: ‖n‖ as an RMS per input, in the units of the inputs.
        num_draws: random points.
        tolerance: of the spectral norms.
        max_steps: of Lanczos.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    radius: float = 1e-2
    num_draws: int = 3
    tolerance: float = 1e-2
    max_steps: int = 60
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        if self.radius <= 0 or self.num_draws < 1:
            raise ValueError(
                f"radius must be positive and num_draws at least 1, got {self.radius}, "
                f"{self.num_draws}."
            )

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """One measurement, ``nonlinear_influence_bound``."""
        values: list[float | None] = []
        notes: list[str] = []
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            estimate = problem.largest(generator, self.tolerance, self.max_steps).estimate
            norm = estimate.value.clamp_min(0).sqrt().to(problem.gradients)
            mu_gradient, mu_jacobian, spent = self._constants(problem, norm, generator)
            projected = torch.linalg.vector_norm(problem.operator.rmatvec(problem.deltas), dim=1)
            released = torch.linalg.vector_norm(problem.gradients + problem.deltas, dim=1)
            bound = projected / (mu_gradient * norm + 2 * mu_jacobian * released)
            for sample, sound in enumerate(problem.sound):
                unhidden = not bool(problem.deltas[sample].any())
                values.append(float(bound[sample]) if sound else None)
                notes.append(problem.notes[sample] or (UNDEFENDED if unhidden else ""))
            products += (problem.operator.products - before + spent) * len(problem.notes)
        return [
            measurement(
                "nonlinear_influence_bound",
                values,
                notes,
                "model input",
                "larger is safer",
                products,
            )
        ]

    def _constants(
        self, problem: SampleProblem, norm: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int]:
        """μ_L, μ_J and the products spent on the differences."""
        mu_gradient, mu_jacobian, spent = norm, torch.zeros_like(norm), 0
        for _ in range(self.num_draws):
            draw = torch.randn(problem.inputs.shape, generator=generator, dtype=torch.float64)
            noise = self.radius * draw.to(problem.inputs)
            length = torch.linalg.vector_norm(noise, dim=1)

            def change(x: Tensor, shift: Tensor = noise) -> Tensor:
                return problem.oracle(x + shift) - problem.oracle(x)

            difference = FunctionJacobian(change, problem.inputs)
            moved = torch.linalg.vector_norm(difference.value, dim=1)
            mu_gradient = torch.maximum(mu_gradient, moved / length)
            start = random_start(difference, generator)
            top = largest_eigenvalue(difference, start, self.tolerance, self.max_steps)
            steepest = top.estimate.value.clamp_min(0).sqrt().to(norm) / length
            mu_jacobian = torch.maximum(mu_jacobian, steepest)
            spent += difference.products
        return mu_gradient, mu_jacobian, spent
