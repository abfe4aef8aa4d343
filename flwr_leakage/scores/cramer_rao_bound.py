"""Compute the Cramér–Rao bound on the error of an unbiased attacker."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column
from flwr_leakage.scores.spectral_bound import SpectralBound


@dataclass(frozen=True)
class CramerRaoBound(SpectralBound):
    """σᵢ √(Σ(1/λ)/N), a lower bound of an unbiased attacker's RMSE; J ∈ R^{N×P}.

    It is the expected I²F without damping (Zhang et al. 2023, equation 6) under its proper name
    (Cramér 1946, Rao 1945). It holds for the network itself, not for its linearisation, where

    - the noise is independent and Gaussian, of known σ on every entry;
    - the attacker is unbiased: no image prior, no clamping to the range of pixels;
    - J has full rank, else there is no unbiased attacker, and no number here.

    An attacker with a prior trades variance for bias and may go below: see ``BayesianBound``. For
    sample i of a batch, σᵢ = σ/wᵢ, as an attacker who knows all other samples is the strongest.
    """

    def squared_error(self, eigenvalues: Tensor, noise_std: Tensor) -> Tensor:
        """Return σ²/λ."""
        return noise_std**2 / eigenvalues

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``cramer_rao_bound_rmse``."""
        name = "cramer_rao_bound_rmse"
        return [self.bound(name, problem, draws, exact="lower bound", full_rank=True)]
