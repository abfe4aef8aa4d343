"""Bound an attacker's chance to identify a sample among candidates (reconstruction robustness)."""

import math
from dataclasses import dataclass

import torch

from flwr_leakage.bounds import guess_bound
from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.scores.noise_level import check_noise_std, noise_level


@dataclass(frozen=True)
class ReconstructionRobustness(SampleScore):
    """Φ(Φ⁻¹(κ) + μᵢ) with μᵢ = √T Cᵢ/σᵢ: the largest chance of any attacker to name the sample.

    This is the reconstruction robustness (Balle et al. 2022; Hayes et al. 2023; for Gaussian
    privacy Kaissis et al. 2023) against an attacker who has chance κ without this sample's share of
    the update, and knows all others. It holds for every attacker and every prior with this κ,
    biased or not.

    With ``clipping_norm`` it is a guarantee for every sample whose gradient is clipped to it.
    Without, Cᵢ = ‖gᵢ‖: the sample's own, as in individual privacy accounting (Feldman and Zrnic
    2021), which other samples may not have, and which itself is private.

    Attributes:
        prior: κ in (0, 1): 1/n for one of n equally likely candidates.
        clipping_norm: C of every sample's gradient; ``None`` takes ‖gᵢ‖.
        num_rounds: T, in which the sample takes part under the same noise, ≥ 1.
        noise_std: σ of the noise on the pseudo-gradient; ``None`` reads it from δ, where δ is
            independent Gaussian noise of one size.
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
        """Return ``reconstruction_robustness``, a probability."""
        level, notes = noise_level(problem, self.noise_std)
        mu = math.sqrt(self.num_rounds) * sample_norms(problem, self.clipping_norm) / level
        chances = [guess_bound(m, self.prior) for m in mu.tolist()]
        states: list[State] = ["unresolved" if note else "upper bound" for note in notes]
        return [
            Column(
                "reconstruction_robustness",
                torch.tensor(chances, dtype=torch.float64),
                "1",
                "larger leaks more",
                notes,
                None,
                states,
            )
        ]


def check_clipping(clipping_norm: float | None, num_rounds: int) -> None:
    """Raise ``ValueError`` for settings out of range."""
    if clipping_norm is not None and not 0 < clipping_norm < math.inf:
        raise ValueError(f"clipping_norm must be None or positive, got {clipping_norm}.")
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1, got {num_rounds}.")


def sample_norms(problem: SampleProblem, clipping_norm: float | None) -> torch.Tensor:
    """Return Cᵢ (S,): the clipping norm, or the length of each sample's own gradient."""
    own = row_norms(problem.gradients).double()
    return own if clipping_norm is None else torch.full_like(own, clipping_norm)
