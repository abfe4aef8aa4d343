"""Draw which samples MixUp and InstaHide mix, and with which coefficients."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.randomness import Randomness

_MAX_REDRAWS = 64


@dataclass(frozen=True)
class Mixing:
    """A mixing of samples: encoding i is Σⱼ ``coefficients[i, j]`` · sample ``indices[i, j]``.

    Attributes:
        indices: (B, k) indices of samples, distinct in each row; the first one is sample i itself.
        coefficients: (B, k) coefficients ≥ 0, whose rows sum to one.
    """

    indices: Int[Tensor, "B k"]
    coefficients: Float[Tensor, "B k"]

    def matrix(self, num_samples: int) -> Float[Tensor, "B n"]:
        """Return the matrix W (B, n) with which the encodings are W · samples, for n =
        ``num_samples``.
        """
        weights = torch.zeros(len(self.indices), num_samples, dtype=self.coefficients.dtype).to(
            self.coefficients.device
        )
        return weights.scatter_add(1, self.indices, self.coefficients)


def check_mixing(k: int, max_coefficient: float) -> None:
    """Raise ``ValueError`` unless k ≥ 1 coefficients ≤ ``max_coefficient`` can sum to one."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    if not max_coefficient <= 1 or (k > 1 and not max_coefficient > 1 / k):
        raise ValueError(
            f"max_coefficient must lie in (1 / k, 1] = ({1 / k:.3g}, 1], got {max_coefficient}."
        )


def draw_indices(num_samples: int, k: int, randomness: Randomness) -> Int[Tensor, "B k"]:
    """Return random partners for each of B samples, so that every sample is in exactly k rows.

    Row i of the result (B, k) holds the index of sample i and those of its k − 1 partners. The
    samples are put on a circle in random order. Each sample is mixed with those at k − 1 random
    distances from it, which are equal for all samples. So no sample is mixed with itself, unlike in
    Huang et al. (2020, algorithm 2).

    Raises:
        ValueError: there are fewer than k samples.
    """
    if num_samples < k:
        raise ValueError(
            f"k = {k} samples cannot be mixed out of {num_samples}: encode more samples at once "
            "(a whole epoch), or lower k."
        )
    order = randomness.permutation(num_samples)
    distances = 1 + randomness.permutation(num_samples - 1)[: k - 1]
    distances = torch.cat([distances.new_zeros(1), distances])
    place = torch.argsort(order)
    return order[(place[:, None] + distances) % num_samples]


def draw_coefficients(
    num_samples: int, k: int, max_coefficient: float, randomness: Randomness
) -> Float[Tensor, "B k"]:
    """Return coefficients (B, k) drawn uniformly from the simplex, none above ``max_coefficient``.

    Huang et al. (2021, section 5.1) use the bound 0.65. Rows with a larger coefficient are drawn
    again. After 64 attempts, the coefficients of such a row are moved towards 1 / k until they keep
    the bound. For k = 1 the coefficient is one.
    """
    if k == 1:
        return torch.ones(num_samples, 1)
    # Most of the time of a draw does not depend on its size. So each attempt draws twice as many
    # rows as there are samples, of which mostly enough have no coefficient above the bound.
    kept: list[Tensor] = []
    missing = num_samples
    for _ in range(_MAX_REDRAWS):
        draws = _simplex(2 * num_samples, k, randomness)
        kept.append(draws[draws.amax(1) <= max_coefficient])
        missing -= len(kept[-1])
        if missing <= 0:
            return torch.cat(kept)[:num_samples]
    draws = _simplex(missing, k, randomness)
    excess = (draws.amax(1, keepdim=True) - 1 / k).clamp_min(max_coefficient - 1 / k)
    pulled = 1 / k + (draws - 1 / k) * (max_coefficient - 1 / k) / excess
    return torch.cat([*kept, pulled])


def _simplex(num_samples: int, k: int, randomness: Randomness) -> Tensor:
    draws = randomness.exponential((num_samples, k))
    return draws / draws.sum(1, keepdim=True)


def draw_mixing(num_samples: int, k: int, max_coefficient: float, randomness: Randomness) -> Mixing:
    """Return a random mixing with k samples in each encoding and coefficients ≤
    ``max_coefficient``.
    """
    return Mixing(
        draw_indices(num_samples, k, randomness),
        draw_coefficients(num_samples, k, max_coefficient, randomness),
    )


def mix(values: Float[Tensor, "n ..."], mixing: Mixing) -> Float[Tensor, "B ..."]:
    """Return Σⱼ coefficients[i, j] · values[indices[i, j]] for each encoding i of ``mixing``."""
    mixed = F.embedding_bag(
        mixing.indices.to(values.device),
        values.flatten(1),
        mode="sum",
        per_sample_weights=mixing.coefficients.to(values.device, values.dtype),
    )
    return mixed.reshape(-1, *values.shape[1:])


def soft_targets(targets: Tensor, num_classes: int, dtype: torch.dtype) -> Float[Tensor, "B K"]:
    """Return targets as class probabilities (B, K): class indices become one-hot."""
    if targets.ndim == 2:
        return targets.to(dtype)
    return F.one_hot(targets, num_classes).to(dtype)
