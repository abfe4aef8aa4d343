"""A lower bound of the inversion influence from a few steps of LSQR: cheap, and it ranks right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Direction, Exposure, Measurement
from flwr_leakage.scores.inversion_influence import UNDEFENDED
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    SampleProblem,
    measurement,
    sample_problems,
)
from flwr_leakage.spectral import solve_damped

NOT_FINITE = "δ, the released minus the raw update, is not finite: look for NaN in the batch"
_NO_DAMPING = 1e-12


@dataclass(frozen=True)
class InfluenceKrylovBound:
    """‖x_k‖ ≤ ‖(JJᵀ)⁻¹Jδ‖, with x_k the k-th iterate of LSQR from zero, J = ∇ₓ∇_θL ∈ R^{N×P}.

    The iterates of LSQR grow towards the least-squares solution (Paige and Saunders 1982), so
    each is a lower bound of the undamped I²F. Eight steps reach about a quarter of it on LeNet,
    where I_lb = ‖Jδ‖/λmax reaches a thousandth, and they rank samples as attacks do (Spearman
    .6 under equal noise), where I_lb and an I²F with a damping of 1e-3 λmax rank them backwards:
    damping removes just the directions in which samples differ.

    - ``influence_krylov_bound_rmse``: ‖x_k‖/√N for the sample's share of the released δ;
    - ``unit_noise_influence_bound_rmse``: the same for one draw of Gaussian noise of standard
      deviation 1 on every entry of the sample's gradient, where δ = 0: the number by which to
      compare the samples of an undefended client.

    Attributes:
        num_steps: k, of two products each.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    num_steps: int = 8
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}.")

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """One measurement, and a second one where δ = 0."""
        values: list[float | None] = []
        notes: list[str] = []
        probed: list[float | None] = []
        products = 0
        hidden = True
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            hidden = bool(problem.deltas.any())
            known = problem.deltas.isfinite().all(1)
            # A stand-in takes the place of a bad δ, as samples share their decompositions.
            deltas = torch.where(known[:, None], problem.deltas, 0.0)
            if not hidden:
                draw = torch.randn(deltas.shape, generator=generator, dtype=torch.float64)
                deltas = draw.to(deltas)
            norms, flat = self._bound(problem, deltas)
            for sample in range(len(problem.notes)):
                value = float(norms[sample])
                reason = problem.notes[sample]
                if not reason and not bool(known[sample]):
                    reason = NOT_FINITE
                elif not reason and bool(flat[sample]):
                    reason = "J = 0: there is nothing to invert"
                usable = not reason
                found = value if usable else None
                values.append(found if hidden or found is None else 0.0)
                probed.append(found)
                notes.append(("" if hidden else UNDEFENDED) if usable else reason)
            products += (problem.operator.products - before) * len(problem.notes)
        name = "influence_krylov_bound_rmse"
        safer: Direction = "larger is safer"
        found_all = [measurement(name, values, list(notes), "model input", safer, products)]
        if not hidden:
            name = "unit_noise_influence_bound_rmse"
            remarks = [note if v is None else "" for note, v in zip(notes, probed, strict=True)]
            unit = "model input per unit of noise"
            found_all.append(measurement(name, probed, remarks, unit, safer, 0))
        return found_all

    def _bound(self, problem: SampleProblem, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """‖x_k‖/√N, and where J = 0."""
        solved = solve_damped(problem.operator, deltas, (_NO_DAMPING,), 0.0, self.num_steps)
        return solved.lower_bounds[:, 0] / problem.operator.num_inputs**0.5, solved.largest == 0
