"""I_lb: a lower bound of the inversion influence from two quantities that are cheap."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.inversion_influence import UNDEFENDED
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    from_estimate,
    measurement,
    sample_problems,
)


@dataclass(frozen=True)
class InfluenceLowerBound:
    """I_lb = ‖Jδ‖/λmax(JJᵀ) ≤ I²F (Zhang et al. 2023, equation 6), J ∈ R^{N×P}.

    A valid bound of the undamped I²F, but a loose one: on LeNet it lies 16–48 times below the
    error that attacks reach, and within one noise level it may rank samples backwards. λmax
    enters from above, that is, increased by its own error bound, so that it stays a bound.

    Attributes:
        tolerance: of λmax.
        max_steps: products of JJᵀ at most.
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
        """``influence_nominal`` (I_nom = ‖Jδ‖) and ``influence_lower_bound``."""
        nominal: list[float | None] = []
        bounds: list[float | None] = []
        nominal_notes: list[str] = []
        notes: list[str] = []
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            projected = torch.linalg.vector_norm(problem.operator.rmatvec(problem.deltas), dim=1)
            estimate = problem.largest(generator, self.tolerance, self.max_steps).estimate
            products += (problem.operator.products - before) * len(problem.notes)
            tops, remarks = from_estimate(problem, estimate, bound="λmax at least")
            for sample, top in enumerate(tops):
                sound = problem.sound[sample]
                length = float(projected[sample])
                unhidden = sound and not bool(problem.deltas[sample].any())
                nominal.append(length if sound else None)
                nominal_notes.append(UNDEFENDED if unhidden else problem.notes[sample])
                if top == 0:
                    top, remarks[sample] = None, "J = 0: there is nothing to invert"
                above = 1 + float(estimate.residual[sample])
                bounds.append(None if top is None else length / (top * above))
                notes.append(remarks[sample] or (UNDEFENDED if unhidden else ""))
        return [
            measurement("influence_nominal", nominal, nominal_notes, "1", "larger is safer", 0),
            measurement(
                "influence_lower_bound", bounds, notes, "model input", "larger is safer", products
            ),
        ]
