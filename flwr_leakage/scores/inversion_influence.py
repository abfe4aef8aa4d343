"""The inversion influence I²F: the recovery error that a perturbation of the update causes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    SampleProblem,
    measurement,
    sample_problems,
)
from flwr_leakage.spectral import solve_damped, spectral_sum

UNDEFENDED = "δ = 0: nothing was hidden, a perfect attacker recovers this sample exactly"


@dataclass(frozen=True)
class InversionInfluence:
    """I²F = ‖(JJᵀ + εI)⁻¹Jδ‖ (Zhang et al. 2023, equation 4), J = ∇ₓ∇_θL ∈ R^{N×P}.

    To first order, what a perfect attacker's reconstruction is off by when the gradient is off
    by δ. Three measurements for each damping, named by ε/λmax:

    - ``inversion_influence_…``: the norm, as in the paper's formula;
    - ``inversion_influence_rmse_…``: divided by √N, comparable with an RMSE;
    - ``expected_influence_rmse_…``: √(Σλᵢ/(λᵢ + ε)²/N), the expected RMSE for Gaussian noise of
      standard deviation 1 on every entry of the sample's gradient (so n-fold for n). It needs
      no δ, so it ranks the samples of an undefended client, too.

    δ of a sample is its share of the update's, see ``flwr_leakage.scores.samples``. By LSQR
    with full reorthogonalisation and by stochastic Lanczos quadrature.

    Attributes:
        relative_dampings: ε/λmax, > 0. Only small ones are faithful: on an untrained LeNet, 1e-6
            ranks 32 digits under equal noise as an attack's error does (Spearman .88), 1e-3
            backwards (−.46).
        tolerance: relative, of I²F.
        max_steps: of LSQR and of a probe at most, of two products each.
        expected: when to compute the expected influence: ``undefended`` is where δ = 0.
        num_probes: for it; the sampling error with one probe is 5–10 %.
        lambda_max_tolerance: of λmax, to which the damping is relative.
        point: see ``sample_problems``.
        precision: see ``sample_problems``; ``float64`` for dampings below 1e-5.
        memory_bytes: see ``sample_problems``.
    """

    relative_dampings: Sequence[float] = (1e-6,)
    tolerance: float = 1e-2
    max_steps: int = 1000
    expected: Literal["always", "undefended", "never"] = "undefended"
    num_probes: int = 1
    lambda_max_tolerance: float = 1e-2
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "relative_dampings", tuple(self.relative_dampings))
        if not self.relative_dampings or min(self.relative_dampings) <= 0:
            raise ValueError(f"relative_dampings must be positive, got {self.relative_dampings}.")
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1, got {self.num_probes}.")
        if self.expected not in ("always", "undefended", "never"):
            raise ValueError(
                f"expected must be 'always', 'undefended' or 'never', got {self.expected!r}."
            )

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """Two or three measurements for each damping."""
        columns: dict[str, list[float | None]] = {}
        notes: dict[str, list[str]] = {}
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            before = problem.operator.products
            for name, found, remarks in self._measure(problem, generator):
                columns.setdefault(name, []).extend(found)
                notes.setdefault(name, []).extend(remarks)
            products += (problem.operator.products - before) * len(problem.notes)
        unit = {False: "model input", True: "model input per unit of noise"}
        return [
            measurement(
                name,
                values,
                notes[name],
                unit[name.startswith("expected")],
                "larger is safer",
                products if index == 0 else 0,
            )
            for index, (name, values) in enumerate(columns.items())
        ]

    def _measure(
        self, problem: SampleProblem, generator: torch.Generator
    ) -> list[tuple[str, list[float | None], list[str]]]:
        top = problem.largest(generator, self.lambda_max_tolerance, self.max_steps).estimate.value
        results = []
        dimension = problem.operator.num_inputs
        norms, converged = self._influence(problem, top)
        zero = (problem.deltas == 0).all(1).tolist()
        for index, damping in enumerate(self.relative_dampings):
            found, remarks = [], []
            for sample, sound in enumerate(problem.sound):
                value = float(norms[sample, index])
                note = problem.notes[sample]
                if sound and float(top[sample]) == 0:
                    note = "J = 0: the gradient does not depend on the input to first order"
                elif sound and zero[sample]:
                    note = UNDEFENDED
                elif sound and not converged[sample, index]:
                    note = f"unresolved: at least {value:.3g} after {self.max_steps} steps"
                usable = sound and bool(converged[sample, index]) and float(top[sample]) > 0
                found.append(value if usable else None)
                remarks.append(note)
            label = f"{damping:.0e}"
            rmse = [None if v is None else v / dimension**0.5 for v in found]
            results.append((f"inversion_influence_{label}", found, list(remarks)))
            results.append((f"inversion_influence_rmse_{label}", rmse, list(remarks)))
            if self.expected == "always" or (self.expected == "undefended" and all(zero)):
                results.append(self._expected(problem, damping, label, generator))
        return results

    def _influence(self, problem: SampleProblem, top: Tensor) -> tuple[Tensor, Tensor]:
        """‖(JJᵀ + εI)⁻¹Jδ‖ of every sample and damping, and whether it converged."""
        if not bool(problem.deltas.any()):
            zeros = torch.zeros(len(problem.notes), len(self.relative_dampings))
            return zeros, torch.ones_like(zeros, dtype=torch.bool)
        solved = solve_damped(
            problem.operator,
            problem.deltas,
            tuple(self.relative_dampings),
            self.tolerance,
            self.max_steps,
            largest=top,
        )
        return torch.where(solved.converged, solved.norms, solved.lower_bounds), solved.converged

    def _expected(
        self, problem: SampleProblem, damping: float, label: str, generator: torch.Generator
    ) -> tuple[str, list[float | None], list[str]]:
        trace = spectral_sum(
            problem.operator,
            lambda eigenvalues, top: eigenvalues / (eigenvalues + damping * top) ** 2,
            generator,
            self.num_probes,
            self.max_steps,
            tolerance=0.05,
        )
        found: list[float | None] = []
        for sound, value, largest in zip(
            problem.sound, trace.estimate.value.tolist(), trace.largest.tolist(), strict=True
        ):
            usable = sound and largest > 0
            found.append((value / problem.operator.num_inputs) ** 0.5 if usable else None)
        return f"expected_influence_rmse_{label}", found, list(problem.notes)
