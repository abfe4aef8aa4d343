"""Compute the inversion influence I²F, the recovery error that the perturbation of an update
causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import (
    FLAT,
    UNDEFENDED,
    Column,
    Numbers,
    SampleScore,
    first_notes,
    notes_where,
    nothing_hidden,
    root_error,
)
from flwr_leakage.spectral import dense_spectrum, solve_damped, spectral_sum
from flwr_leakage.spectral.dense import dense_bytes

QUADRATURE_TOLERANCE = 0.02
"""The relative error at which the quadrature with one random vector stops. It is far below the
sampling error over few vectors, so that a smaller value would only take more steps."""


@dataclass(frozen=True)
class InversionInfluence(SampleScore):
    """A score: the inversion influence I²F = ‖(JJᵀ + εI)⁻¹Jδ‖ (Zhang et al. 2023, equation 4).

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs, and λ are the
    eigenvalues of JJᵀ. To first order, I²F is the error of a perfect attacker's reconstruction if
    the gradient is perturbed by δ. There are three quantities for each damping ε, named by ε/λmax:

    - ``inversion_influence_…``: the norm, as in the paper's formula;
    - ``inversion_influence_rmse_…``: the norm divided by √N, comparable with an RMSE;
    - ``expected_influence_rmse_…``: √(Σλᵢ/(λᵢ + ε)²/N), the expected RMSE for Gaussian noise of
      standard deviation 1 on every entry of the sample's gradient (s times that for s). It needs no
      δ, so it ranks the samples of an undefended client, too.

    The perturbation of a sample's gradient is δ/wᵢ, with δ that of the update's pseudo-gradient and
    wᵢ the sample's weight in it. The influence is computed by LSQR with full reorthogonalisation,
    the expected influence by stochastic quadrature. Both stop when a lower and an upper bound of
    the result agree to the tolerance. Few probes say little about a sum over many eigenvalues: the
    error bar of the expected influence is 8 to 25 % with one probe at ε = 1e-6 λmax and more at
    larger ε, and falls as 1/√probes.

    Attributes:
        relative_dampings: the values of ε/λmax, > 0. Only small ones predict attacks: on an
            untrained LeNet, 1e-6 ranks 32 digits under equal noise as an attack's error does
            (Spearman .88), and 1e-3 ranks them in the opposite order (−.46).
        tolerance: the relative error to which I²F is computed.
        max_steps: the largest number of steps of LSQR, and of each random probe, of two Jacobian
            products each.
        expected: when to compute the expected influence: ``always``, ``never``, or with
            ``undefended`` only if δ = 0.
        num_probes: the number of random probes for the expected influence.
        max_dense_inputs: the largest N for which the expected influence is computed exactly from
            the dense J, in N products.
        precision: the floating-point type of all computations. In ``float32`` the error bars grow
            as 1e-6/√(ε/λmax).
    """

    relative_dampings: Sequence[float] = (1e-6,)
    tolerance: float = 1e-2
    max_steps: int = 1000
    expected: Literal["always", "undefended", "never"] = "undefended"
    num_probes: int = 1
    max_dense_inputs: int = 256

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

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes of one sample's dense Jacobian if it is to be formed, else 0."""
        if self.expected == "never" or num_inputs > self.max_dense_inputs:
            return 0
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        return dense_bytes(num_inputs, num_parameters, dtype)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return for each damping the columns ``inversion_influence_…`` and
        ``inversion_influence_rmse_…``, and ``expected_influence_rmse_…`` if that is asked for.
        """
        undefended = bool(problem.undefended.all())
        wanted = self.expected == "always" or (self.expected == "undefended" and undefended)
        columns = []
        spectrum = None
        if wanted and problem.operator.num_inputs <= self.max_dense_inputs:
            spectrum = dense_spectrum(problem.operator)
        zeros = [nothing_hidden(problem)] * len(self.relative_dampings)
        influences = zeros if undefended else self._influences(problem)
        for damping, found in zip(self.relative_dampings, influences, strict=True):
            label, root = f"{damping:.0e}", problem.inputs.shape[1] ** 0.5
            for kind, scale in (("", 1.0), ("rmse_", root)):
                scaled = found._replace(values=found.values / scale, errors=found.errors / scale)
                name = f"inversion_influence_{kind}{label}"
                columns.append(scaled.column(name, "model input", "larger is safer"))
            if wanted:
                columns.append(self._expected(problem, spectrum, damping, label, draws))
        return columns

    def _influences(self, problem: SampleProblem) -> list[Numbers]:
        """Return, for each damping ε, the inversion influence ‖(JJᵀ + εI)⁻¹Jδ‖ of every sample; J
        is the Jacobian of the sample's gradient, and δ that gradient's perturbation.
        """
        dampings = tuple(self.relative_dampings)
        solved = solve_damped(
            problem.operator, problem.deltas, dampings, self.tolerance, self.max_steps
        )
        flat = solved.largest == 0
        found = []
        for place, damping in enumerate(dampings):
            lowest, value = solved.lower_bounds[:, place], solved.norms[:, place]
            widest = lowest * (1 + solved.residual[:, place])
            # ``problem.rounding`` is the rounding error of J relative to √λmax. It is amplified by
            # √λmax ‖(JJᵀ + εI)⁻¹J‖, which is at most 1/(2 √(ε/λmax)).
            slips = value * problem.rounding * (8 + 1 / (2 * damping**0.5))
            notes = first_notes(
                notes_where(flat, "J = 0: the gradient does not depend on the input"),
                notes_where(problem.undefended, UNDEFENDED),
                [
                    "" if known else f"unresolved: at least {low:.3g} after {self.max_steps} steps"
                    for known, low in zip(
                        solved.converged[:, place].tolist(), lowest.tolist(), strict=True
                    )
                ],
            )
            known = solved.converged[:, place] & ~flat
            states: list[State] = [
                "within tolerance" if k else "unresolved" if f else "lower bound"
                for k, f in zip(known.tolist(), flat.tolist(), strict=True)
            ]
            errors = torch.maximum(widest - value, value - lowest).clamp_min(0) + slips
            found.append(Numbers(torch.where(known, value, torch.nan), notes, errors, states))
        return found

    def _expected(
        self,
        problem: SampleProblem,
        spectrum: Float[Tensor, "S N"] | None,
        damping: float,
        label: str,
        draws: Draws,
    ) -> Column:
        """Return the column of the expected influence √(Σλᵢ/(λᵢ + ε)²/N) at one ``damping`` ε/λmax.

        ``spectrum`` are the N eigenvalues λᵢ of JJᵀ, with J a sample's dense Jacobian; ``None`` for
        quadrature with ``draws``. The column's name ends in ``label``.
        """
        if spectrum is not None:
            total, width, top = _dense_sum(spectrum, problem.rounding, damping)
            resolved, state = torch.ones_like(top, dtype=torch.bool), "exact"
        else:
            trace = spectral_sum(
                problem.operator,
                lambda eigenvalues, top: 1 / (eigenvalues + damping * top) ** 2,
                draws,
                self.num_probes,
                self.max_steps,
                QUADRATURE_TOLERANCE,
                order=1,
            )
            total, top, resolved = trace.estimate.value, trace.largest, trace.estimate.converged
            width = total * (trace.estimate.residual + problem.rounding / damping**0.5)
            state = "within tolerance"
        known = resolved & (top > 0)
        mean = torch.where(known, total, torch.nan) / problem.operator.num_inputs
        notes = [
            "" if number else f"unresolved: the quadrature needs more than {self.max_steps} steps"
            for number in known.tolist()
        ]
        return Column(
            f"expected_influence_rmse_{label}",
            mean.sqrt(),
            "model input per unit of noise",
            "larger is safer",
            first_notes(notes_where(top == 0, FLAT), notes),
            root_error(mean, width / problem.operator.num_inputs),
            cast(State, state),
        )


def _dense_sum(
    eigenvalues: Float[Tensor, "S N"], rounding: Float[Tensor, " S"], damping: float
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Return Σλᵢ/(λᵢ + ε)² over the ``eigenvalues`` λᵢ of JJᵀ for each sample's Jacobian J, a bound
    of its rounding error, and λmax, each (S,). ``rounding`` is the relative error of products with
    J, and ``damping`` is ε/λmax.
    """
    top = eigenvalues[:, :1]
    shifted = eigenvalues + damping * top
    slopes = 2 * eigenvalues.sqrt() * (damping * top - eigenvalues).abs() / shifted**3
    slip = rounding[:, None] * top.sqrt()
    width = slopes * slip + (slip / shifted) ** 2
    return (eigenvalues / shifted**2).sum(1), width.sum(1), top[:, 0]
