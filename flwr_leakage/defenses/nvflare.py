"""Apply the privacy filters of NVIDIA FLARE, with the settings that it ships.

Both filters act on ``Δ / T``, the mean change per step of an update Δ after T local steps. The
classes reproduce the behaviour of ``nvflare/app_common/filters`` in version 2.8.1. Tensors without
axes, which are a single number, are sent unchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.defenses.base import UpdateDefense
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require


def _per_step(update: Update, change: Callable[[Tensor], Tensor]) -> Params:
    """Return ``T · change(Δ / T)`` for an update Δ of T local steps. ``change`` takes all entries
    as one vector; tensors without axes stay as they are.
    """
    steps = update.schedule.num_steps
    vector = ravel(update.delta)
    changed = unravel((change(vector / steps) * steps).to(vector.dtype), update.delta)
    return {n: changed[n].to(v.dtype) if v.ndim else v.clone() for n, v in update.delta.items()}


@dataclass(frozen=True)
class PercentilePrivacy(UpdateDefense):
    """A defense that sets the smallest entries of an update Δ to zero, and clips the others.

    Let c be the ``percentile``-th percentile of ``|Δ| / T`` over all entries, with T local steps.
    Entries of ``Δ / T`` with a magnitude below c become zero, all others are clipped to [−γ, γ].
    NVIDIA FLARE interprets the "largest percentile to share" of Shokri and Shmatikov (2015) in this
    way. There is no guarantee of privacy.

    Attributes:
        percentile: the percentile in [0, 100]; 10 sets a tenth of the entries to zero, not all but
            a tenth.
        gamma: γ > 0, the largest magnitude of an entry of one step's update.
    """

    percentile: float = 10.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile must lie in [0, 100], got {self.percentile}.")
        if not self.gamma > 0:
            raise ValueError(f"gamma must be positive, got {self.gamma}.")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return (
            f"the smallest {self.percentile:g} % of the update’s numbers are left out, and the "
            f"others are clipped to {self.gamma:g} a step"
        )

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors, small entries set to zero and the others clipped."""

        def change(vector: Tensor) -> Tensor:
            sizes = vector.abs()
            cutoff = float(np.percentile(sizes.cpu().numpy(), self.percentile))
            return torch.where(sizes < cutoff, 0.0, vector).clamp(-self.gamma, self.gamma)

        return _per_step(update, change)


@dataclass(frozen=True)
class SVTPrivacy(UpdateDefense):
    """A defense that sends a random share of the entries, clipped and with Laplacian noise.

    It follows the sparse vector technique. Let Δ be the update of P entries after T local steps.
    ``c = ⌈fraction · P⌉`` entries are drawn, with replacement, from those whose ``min(|Δ_i| / T, γ)
    + Lap(2γc / ε_q)`` reaches ``τ + Lap(γ / ε_t)``, with ``ε_t = ε / (1 + (2c)^⅔)`` and ``ε_q = ε −
    ε_t``. The drawn entries are sent as T times ``clip(Δ_i / T, −γ, γ) + Lap(2γ / noise_var)``, and
    all others as zero. Lap(b) is a Laplacian number of scale b.

    By the filter's own accounting, one update costs an ε of ``ε + c · noise_var``, by default 620
    for 62,006 entries, which is no guarantee in practice. What hides samples is that γ, to which
    entries are clipped, is far below the scale of the noise, by default 20 γ.

    Attributes:
        fraction: the share of entries that is sent, in (0, 1].
        epsilon_of_selection: ε > 0 of the choice of entries; the filter's argument ``epsilon``.
        noise_var: the divisor of 2γ that gives the scale of the noise, > 0; it is no variance.
        gamma: the largest magnitude γ > 0 of an entry of one step's update.
        tau: the threshold τ of the choice, to which noise is added.
    """

    fraction: float = 0.1
    epsilon_of_selection: float = 0.1
    noise_var: float = 0.1
    gamma: float = 1e-5
    tau: float = 1e-6

    def __post_init__(self) -> None:
        require(self, "lie in (0, 1]", "fraction")
        require(self, "be positive", "epsilon_of_selection", "noise_var", "gamma")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return (
            f"a random {100 * self.fraction:g} % of the update’s numbers are sent, clipped to "
            f"{self.gamma:g} a step and under noise of {2 / self.noise_var:g} times that"
        )

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors: drawn entries clipped and noised, and zeros elsewhere."""

        def change(vector: Tensor) -> Tensor:
            # NaN becomes 0, as NaN would never pass the threshold, and drawing might not end.
            clipped = vector.double().nan_to_num(0.0).clamp(-self.gamma, self.gamma)

            def noise(count: int, scale: float) -> Tensor:
                return scale * randomness.laplace((count,), torch.float64).to(clipped)

            count = math.ceil(self.fraction * len(vector))
            ratio = (2 * count) ** (2 / 3)
            of_threshold = self.epsilon_of_selection / (1 + ratio)
            of_query = self.epsilon_of_selection - of_threshold
            threshold = self.tau + noise(1, self.gamma / of_threshold)
            rejected, accepted = torch.arange(len(vector)), torch.arange(0)
            while len(accepted) < count:
                response = clipped[rejected].abs()
                response = response + noise(len(rejected), 2 * self.gamma * count / of_query)
                passes = (response >= threshold).cpu()
                accepted = torch.cat([accepted, rejected[passes]])
                rejected = rejected[~passes]
            places = (randomness.uniform((count,)).double() * len(accepted)).long()
            drawn = accepted[places.clamp_max(len(accepted) - 1).cpu()]
            sent = torch.zeros_like(clipped)
            sent[drawn] = clipped[drawn] + noise(count, 2 * self.gamma / self.noise_var)
            return sent

        return _per_step(update, change)
