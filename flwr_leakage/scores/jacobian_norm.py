"""Norms of the Jacobian of the gradient map."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Direction, Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    from_estimate,
    measurement,
    sample_problems,
)


@dataclass(frozen=True)
class JacobianNorm:
    """‖J‖₂ = √λmax(JJᵀ) and ‖J‖_F = √Σλᵢ, J = ∇ₓ∇_θL ∈ R^{N×P}.

    How far the update moves with the input: a larger norm drowns noise of a fixed strength.
    ‖J‖_F² = E‖Jᵀz‖² over random signs z (Hutchinson 1990): its relative standard error over
    the probes is in the note where it exceeds 10 %.

    Attributes:
        num_probes: z's, one product each.
        tolerance: of λmax.
        max_steps: products of JJᵀ at most.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        if self.num_probes < 2:
            raise ValueError(f"num_probes must be at least 2, got {self.num_probes}.")

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """``jacobian_norm`` and ``jacobian_frobenius_norm``."""
        spectral: list[float | None] = []
        frobenius: list[float | None] = []
        spectral_notes: list[str] = []
        frobenius_notes: list[str] = []
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            operator = problem.operator
            before = operator.products
            pairs = problem.largest(generator, self.tolerance, self.max_steps)
            values, notes = from_estimate(problem, pairs.estimate, bound="λmax at least")
            spectral += [None if value is None else value**0.5 for value in values]
            spectral_notes += notes
            squares = []
            for _ in range(self.num_probes):
                shape = (operator.num_blocks, operator.num_inputs)
                signs = 2 * torch.randint(0, 2, shape, generator=generator) - 1
                image = operator.matvec(signs.to(problem.gradients))
                squares.append((image.double() ** 2).sum(1))
            stacked = torch.stack(squares)
            mean = stacked.mean(0)
            error = stacked.std(0) / self.num_probes**0.5 / mean.clamp_min(1e-300) / 2
            for sample, sound in enumerate(problem.sound):
                frobenius.append(float(mean[sample]) ** 0.5 if sound else None)
                spread = float(error[sample])
                remark = f"standard error {spread:.0%}" if spread > 0.1 else ""
                frobenius_notes.append(problem.notes[sample] or remark)
            products += (operator.products - before) * len(problem.notes)
        leak: Direction = "larger leaks more"
        return [
            measurement("jacobian_norm", spectral, spectral_notes, "1", leak, products),
            measurement("jacobian_frobenius_norm", frobenius, frobenius_notes, "1", leak, 0),
        ]
