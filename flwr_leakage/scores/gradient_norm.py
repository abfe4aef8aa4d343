"""The norm of a sample's gradient."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    measurement,
    sample_problems,
)


@dataclass(frozen=True)
class GradientNorm:
    """‖g‖ = ‖∇_θL(x, y)‖: the baseline against which the papers compare their scores.

    It carries no information about the curvature; a larger one drowns noise of a fixed
    strength. Costs one gradient and no product.

    Attributes:
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """One measurement, ``gradient_norm``."""
        values: list[float | None] = []
        notes: list[str] = []
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            norms = torch.linalg.vector_norm(problem.gradients, dim=1).tolist()
            values += [v if ok else None for v, ok in zip(norms, problem.sound, strict=True)]
            notes += problem.notes
        return [measurement("gradient_norm", values, notes, "1", "larger leaks more", 0)]
