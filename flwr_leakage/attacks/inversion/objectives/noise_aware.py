"""The likelihood of an update under noise of known size."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flwr_leakage.attacks.distance import squared_distance
from flwr_leakage.attacks.inversion.objectives.l1 import absolute_distance
from flwr_leakage.params import Params


@dataclass(frozen=True)
class NoiseAware:
    """``−log p(g* | g) / P`` up to a constant, for an attacker who knows the defense's noise.

    For Gaussian noise of standard deviation s, it is the mean of ``(g − g*)² / 2s²`` over all P
    entries; for Laplacian noise, that of ``√2 |g − g*| / s``. At the truth it is 1/2 or 1 on
    average for any noise. So a prior of fixed weight dominates a gradient that noise has made
    worthless, and not one with little noise.

    Attributes:
        noise_std: s of every entry of the pseudo-gradient, > 0, which is the update's divided by
            the learning rate.
        distribution: distribution of the noise.
    """

    noise_std: float
    distribution: Literal["gaussian", "laplacian"] = "gaussian"

    def __post_init__(self) -> None:
        if not self.noise_std > 0:
            raise ValueError(f"noise_std must be positive, got {self.noise_std}.")
        if self.distribution not in ("gaussian", "laplacian"):
            raise ValueError(
                f"distribution must be 'gaussian' or 'laplacian', got {self.distribution!r}."
            )

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        count = sum(value.numel() for value in observed.values())
        if self.distribution == "gaussian":
            return squared_distance(candidate, observed) / (2 * self.noise_std**2 * count)
        return 2**0.5 * absolute_distance(candidate, observed) / (self.noise_std * count)
