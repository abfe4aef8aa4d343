"""Compute the Fisher information leakage of a sample under noise, from its Jacobian's norm."""

from dataclasses import dataclass, field

import torch

from flwr_leakage.bounds import fisher_leakage
from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.scores.base import (
    FLAT,
    Column,
    Numbers,
    SampleScore,
    first_notes,
    mean_with_error,
    notes_where,
    states_of,
)
from flwr_leakage.scores.noise_level import check_noise_std, noise_level


@dataclass(frozen=True)
class FisherLeakage(SampleScore):
    """A score: the diagonal Fisher information leakage η of a sample, its bound 1/η, and √λmax/σᵢ.

    η = √(tr(JJᵀ)/N)/σᵢ, where J ∈ R^{N×P} is the Jacobian of the sample's gradient, λmax the
    largest eigenvalue of JJᵀ, and σᵢ the standard deviation of the noise on that gradient. The
    quantities are:

    - ``fisher_leakage``: η of Guo et al. (2022, section 4);
    - ``fisher_leakage_bound_rmse``: 1/η, a lower bound of an unbiased attacker's RMSE. It needs
      only the trace, and holds without full rank of J, but is smaller than ``CramerRaoBound``;
    - ``fisher_information_loss``: √λmax/σᵢ of Hannun et al. (2021). Its inverse bounds an unbiased
      attacker's error from below along the direction that the update reveals best.

    The trace is estimated by tr(JJᵀ) = E‖Jᵀz‖² over random signs z (Hutchinson 1990). The error
    bars are of 99 %.

    Attributes:
        noise_std: the standard deviation σ of the noise on the pseudo-gradient; with ``None`` it is
            estimated from the defense's perturbation δ, if δ is independent Gaussian noise of one
            size.
        num_probes: the number of vectors z, of one Jacobian product each, ≥ 2.
        tolerance: the relative error to which λmax is computed.
        max_steps: the largest number of products with JJᵀ in the search for λmax.
    """

    noise_std: float | None = None
    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60
    precision: Precision = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        check_noise_std(self.noise_std)
        if self.num_probes < 2:
            raise ValueError(f"num_probes must be at least 2, got {self.num_probes}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``fisher_leakage``, ``fisher_leakage_bound_rmse`` and
        ``fisher_information_loss``.
        """
        level, silent = noise_level(problem, self.noise_std)
        found = problem.largest(self.tolerance, self.max_steps).estimate
        squares = []
        for _ in range(self.num_probes):
            signs = sign_rows(problem.inputs.shape, draws).to(problem.inputs)
            squares.append((problem.operator.matvec(signs).double() ** 2).sum(1))
        trace, width = mean_with_error(torch.stack(squares))
        relative = width / trace.clamp_min(1e-300) / 2
        notes = first_notes(silent, notes_where(trace == 0, FLAT))
        bare = torch.tensor([bool(note) for note in notes])
        noise = torch.where(bare, torch.nan, level)
        leakage = fisher_leakage(trace, noise, problem.operator.num_inputs)
        top = found.value.double().clamp_min(0).sqrt() / noise
        largest = [
            right if ok else least
            for right, least, ok in zip(
                states_of(top, "within tolerance"),
                states_of(top, "lower bound"),
                found.converged.tolist(),
                strict=True,
            )
        ]
        missed = notes_where(~found.converged, "λmax did not converge: at least this")
        inverse, unit = 1 / leakage, "1 per model input"
        bars = top * (found.residual / 2 + problem.rounding)
        sure, below = states_of(leakage, "within tolerance"), states_of(inverse, "lower bound")
        own = Numbers(leakage, notes, leakage * relative, sure)
        bound = Numbers(inverse, notes, inverse * relative, below)
        loss = Numbers(top, first_notes(notes, missed), bars, largest)
        return [
            own.column("fisher_leakage", unit, "larger leaks more"),
            bound.column("fisher_leakage_bound_rmse", "model input", "larger is safer"),
            loss.column("fisher_information_loss", unit, "larger leaks more"),
        ]
