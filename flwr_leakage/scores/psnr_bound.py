"""Bound the PSNR of attackers who choose the model, for updates with noise."""

import math
from dataclasses import dataclass

import torch

from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore, first_notes, notes_where
from flwr_leakage.scores.noise_level import check_noise_std, noise_level
from flwr_leakage.scores.reconstruction_robustness import check_clipping, sample_norms


@dataclass(frozen=True)
class PSNRBound(SampleScore):
    """A score: the error (σᵢ/Cᵢ)‖x‖/√T of an attacker who chooses the model, as RMSE and as PSNR.

    Such an attacker chooses a model for which the gradient of sample i is the image x itself,
    scaled to norm Cᵢ (Riess et al. 2024). Noise of standard deviation σᵢ on the gradient is then
    noise of (σᵢ/Cᵢ)‖x‖ on each pixel, and √T times less in the mean of T releases. No attacker
    without a prior of images has a smaller error, whatever the model. An attacker with a prior may
    have a smaller error if the PSNR is low. The quantities are:

    - ``psnr_bound_rmse``: the RMSE in model input units, larger is safer;
    - ``psnr_bound``: 20 log₁₀(range/RMSE) in dB, larger leaks more. The range is ``data_range``, or
      the range of the sample's own inputs.

    Attributes:
        clipping_norm: the norm C to which every sample's gradient is clipped; ``None`` takes ‖gᵢ‖,
            the norm of the sample's own gradient.
        num_rounds: the number T ≥ 1 of releases of the sample under independent noise, which
            averages out.
        data_range: the largest less the smallest possible model input, > 0; ``None`` takes the
            range of the sample's own inputs, which is smaller.
        noise_std: the standard deviation σ of the noise on the pseudo-gradient; with ``None`` it is
            estimated from the defense's perturbation δ, if δ is independent Gaussian noise of one
            size.
    """

    clipping_norm: float | None = None
    num_rounds: int = 1
    data_range: float | None = None
    noise_std: float | None = None

    def __post_init__(self) -> None:
        check_noise_std(self.noise_std)
        check_clipping(self.clipping_norm, self.num_rounds)
        if self.data_range is not None and not 0 < self.data_range < math.inf:
            raise ValueError(f"data_range must be None or positive, got {self.data_range}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``psnr_bound_rmse`` in model input units and ``psnr_bound`` in dB."""
        level, silent = noise_level(problem, self.noise_std)
        norms = sample_norms(problem, self.clipping_norm)
        length = row_norms(problem.inputs).double()
        rmse = level / norms * length / math.sqrt(self.num_rounds)
        spans = problem.inputs.amax(1) - problem.inputs.amin(1)
        span = spans.double() if self.data_range is None else torch.tensor(self.data_range)
        psnr = 20 * (span / rmse).log10()
        empty = "no bound: the sample's gradient or its image is zero"
        notes = first_notes(silent, notes_where((norms == 0) | (length == 0), empty))
        shown = torch.tensor([not note for note in notes])
        rmse, psnr = (torch.where(shown, values, torch.nan) for values in (rmse, psnr))
        name = "psnr_bound_rmse"
        return [
            Column(name, rmse, "model input", "larger is safer", notes, None, "lower bound"),
            Column("psnr_bound", psnr, "dB", "larger leaks more", notes, None, "upper bound"),
        ]
