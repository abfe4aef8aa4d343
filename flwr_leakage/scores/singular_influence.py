"""The influence of a perturbation along a singular direction of J."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.lavp import LAVP
from flwr_leakage.scores.samples import DEFAULT_MEMORY_BYTES, Point, Precision


@dataclass(frozen=True)
class SingularInfluence:
    """I²F of a unit δ along the first and the last right singular vector of J: 1/√λ.

    The least and the most that noise of norm 1 in the span of J can do: a defense that is free
    to choose its direction should choose the last. (Zhang et al. 2023, section 4.2, print 1/λ,
    which is the *squared* error: JJᵀ has the eigenvalue λ, J the singular value √λ.)

    Attributes:
        smallest: whether to compute the last one, too, which is dear (see ``LAVP``).
        tolerance: of λmax.
        min_tolerance: of λmin.
        max_steps: of a Lanczos run.
        max_dense_inputs: see ``LAVP``.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``LAVP``.
    """

    smallest: bool = True
    tolerance: float = 1e-2
    min_tolerance: float = 1e-2
    max_steps: int = 300
    max_dense_inputs: int = 4096
    point: Point = "defended"
    precision: Precision = "float64"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """``first_singular_influence`` and ``last_singular_influence``."""
        spectrum = LAVP(
            quantities=("lambda_max", "lambda_min") if self.smallest else ("lambda_max",),
            tolerance=self.tolerance,
            min_tolerance=self.min_tolerance,
            max_steps=self.max_steps,
            max_dense_inputs=self.max_dense_inputs,
            point=self.point,
            precision=self.precision,
            memory_bytes=self.memory_bytes,
        )
        results = []
        names = ("first_singular_influence", "last_singular_influence")
        for name, source in zip(names, spectrum(gradient_map, exposure, generator), strict=False):
            notes = list(source.notes) or [""] * len(source.values)
            values: list[float | None] = []
            for sample, value in enumerate(source.values):
                values.append(value**-0.5 if value else None)
                if value == 0:
                    notes[sample] = "J = 0: there is nothing to invert"
            results.append(
                Measurement(
                    name,
                    tuple(values),
                    "model input per unit of gradient",
                    "larger is safer",
                    tuple(notes) if any(notes) else (),
                    source.products,
                )
            )
        return results
