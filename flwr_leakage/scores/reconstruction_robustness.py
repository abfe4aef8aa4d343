"""Bound an attacker's probability to identify a sample among candidates."""

import math
from dataclasses import dataclass

import torch

from flwr_leakage.bounds import guess_bound
from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.scores.noise_level import check_noise_std, noise_level


@dataclass(frozen=True)
class ReconstructionRobustness(SampleScore):
    """A score: the largest probability Φ(Φ⁻¹(κ) + μᵢ) of any attacker to identify a sample.

    Here κ is the probability before the release, and μᵢ = √T Cᵢ/σᵢ, with Cᵢ the norm of sample i's
    gradient, σᵢ the standard deviation of the noise on it, T the number of releases, and Φ the
    normal distribution function.

    This is the reconstruction robustness (Balle et al. 2022; Hayes et al. 2023; for Gaussian
    privacy Kaissis et al. 2023) against an attacker who knows all other samples, and has the
    probability κ without this sample's part of the update. The bound holds for every attacker,
    biased or not, and every prior with this κ.

    With ``clipping_norm`` it is a guarantee for every sample whose gradient is clipped to that
    norm. Without, Cᵢ = ‖gᵢ‖ is the norm of the sample's own gradient, as in individual privacy
    accounting (Feldman and Zrnic 2021): the value then does not hold for other samples, and is
    itself private.

    Attributes:
        prior: the probability κ in (0, 1); 1/n for one of n equally likely candidates.
        clipping_norm: the norm to which every sample's gradient is clipped; ``None`` takes ‖gᵢ‖.
        num_rounds: the number T ≥ 1 of rounds in which the sample takes part, under noise of the
            same size.
        noise_std: the standard deviation σ of the noise on the pseudo-gradient; with ``None`` it is
            estimated from the defense's perturbation δ, if δ is independent Gaussian noise of one
            size.
    """

    prior: float = 0.1
    clipping_norm: float | None = None
    num_rounds: int = 1
    noise_std: float | None = None

    def __post_init__(self) -> None:
        check_noise_std(self.noise_std)
        guess_bound(0.0, self.prior)
        check_clipping(self.clipping_norm, self.num_rounds)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``reconstruction_robustness``: the largest probability of any attacker
        to identify the sample.
        """
        level, notes = noise_level(problem, self.noise_std)
        mu = math.sqrt(self.num_rounds) * sample_norms(problem, self.clipping_norm) / level
        chances = torch.tensor(
            [guess_bound(m, self.prior) for m in mu.tolist()], dtype=torch.float64
        )
        name = "reconstruction_robustness"
        return [Column(name, chances, "1", "larger leaks more", notes, None, "upper bound")]


def check_clipping(clipping_norm: float | None, num_rounds: int) -> None:
    """Raise ``ValueError`` unless the clipping norm is ``None`` or positive, and ``num_rounds`` ≥
    1.
    """
    if clipping_norm is not None and not 0 < clipping_norm < math.inf:
        raise ValueError(f"clipping_norm must be None or positive, got {clipping_norm}.")
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1, got {num_rounds}.")


def sample_norms(problem: SampleProblem, clipping_norm: float | None) -> torch.Tensor:
    """Return, for each sample (S,), the clipping norm; if it is ``None``, the norm of the sample's
    gradient.
    """
    own = row_norms(problem.gradients).double()
    return own if clipping_norm is None else torch.full_like(own, clipping_norm)
