"""Compute the Bayesian bound: the expected error of the best attacker with a Gaussian prior."""

import math
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.bounds import posterior_variance
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column
from flwr_leakage.scores.spectral_bound import SpectralBound


@dataclass(frozen=True)
class BayesianBound(SpectralBound):
    """A score: the linearised Bayesian bound √(Σₖ 1/(λₖ/σ² + 1/τ²)/N) of an attacker's RMSE.

    The sum is over the N eigenvalues λₖ of JJᵀ, where J ∈ R^{N×P} is the Jacobian of a sample's
    gradient, and σ is the standard deviation of the noise on that gradient. If the gradient were
    linear in the image, the bound would be the expected RMSE of the best attacker, biased or not,
    whose prior of every input is N(μ, τ²). The bound holds for the mean over images drawn from this
    prior, and not for a single image. (For the network itself, without linearisation, the bound of
    van Trees 1968 holds, which averages JJᵀ over these images, and is at most the mean of the bound
    here.) Real images have a better prior than independent pixels: an attacker with a prior of
    smooth images may have a smaller error. ``TargetRisk`` chooses its noise by this formula.

    Attributes:
        prior_std: the standard deviation τ > 0 of the prior, in model input units; 1 for
            standardised inputs.
    """

    prior_std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.prior_std < math.inf:
            raise ValueError(f"prior_std must be positive, got {self.prior_std}.")

    def squared_error(self, eigenvalues: Tensor, noise_std: Tensor) -> Tensor:
        """Return τ²σ²/(σ² + τ²λ) (S, k), the attacker's squared error along the eigenvector of each
        λ.

        Here λ are eigenvalues of JJᵀ for a sample's Jacobian J, τ is the standard deviation of the
        attacker's prior, and σ that of the noise.
        """
        return posterior_variance(eigenvalues, noise_std**2, self.prior_std**2)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``bayesian_bound_rmse``, in model input units."""
        name = "bayesian_bound_rmse"
        return [self.bound(name, problem, draws, exact="exact", full_rank=False)]
