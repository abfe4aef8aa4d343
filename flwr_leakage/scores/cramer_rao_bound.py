"""Compute the Cramér–Rao bound on the error of an unbiased attacker."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column
from flwr_leakage.scores.spectral_bound import SpectralBound


@dataclass(frozen=True)
class CramerRaoBound(SpectralBound):
    """A score: the Cramér–Rao bound σᵢ √(Σ(1/λ)/N) of an unbiased attacker's RMSE.

    The sum is over the N eigenvalues λ of JJᵀ, where J ∈ R^{N×P} is the Jacobian of a sample's
    gradient. For sample i of a batch, σᵢ = σ/wᵢ, with σ the standard deviation of the noise on the
    pseudo-gradient and wᵢ the sample's weight in it. This is the noise for the strongest attacker,
    who knows all other samples. The bound is the expected I²F without damping (Zhang et al. 2023,
    equation 6) under its proper name (Cramér 1946, Rao 1945). It holds for the network itself, not
    only for its linearisation, if

    - the noise is independent and Gaussian, of known σ on every entry;
    - the attacker is unbiased: no image prior, no clamping to the range of pixels;
    - J has full rank; otherwise there is no unbiased attacker, and the score gives no number.

    An attacker with a prior trades variance for bias and may have a smaller error: see
    ``BayesianBound``.
    """

    def squared_error(self, eigenvalues: Tensor, noise_std: Tensor) -> Tensor:
        """Return σ²/λ (S, k) for eigenvalues λ (S, k) of JJᵀ, with J the Jacobian of a sample's
        gradient, and standard deviations σ (S, 1) of the noise on that gradient.
        """
        return noise_std**2 / eigenvalues

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``cramer_rao_bound_rmse``, in model input units."""
        name = "cramer_rao_bound_rmse"
        return [self.bound(name, problem, draws, exact="lower bound", full_rank=True)]
