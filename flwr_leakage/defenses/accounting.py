"""What Gaussian noise on an update guarantees, (ε, δ), and what canaries show.

Everything follows from one number. Adding N(0, σ²) to a sum that one client can move by at most
Δ in norm, T times, is as private as telling N(0, 1) from N(μ, 1) with

    μ = √T Δ / σ                                                                     (1)

(Gaussian differential privacy, Dong, Roth and Su 2022, corollary 3.3: exact, no approximation).
What that allows of guesses and images: ``flwr_leakage.bounds``.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import log_ndtr, ndtri
from torch import Tensor

from flwr_leakage.params import Params

_BISECTIONS = 100


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ at which a μ-Gaussian mechanism is (ε, δ)-differentially private.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018, theorem 8).
    """
    if mu == 0:
        return 0.0
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε at which a μ-Gaussian mechanism is (ε, δ)-differentially private.

    Args:
        mu: (1), ≥ 0; √T over the noise multiplier for T releases.
        delta: in (0, 1).

    Example:
        >>> round(gaussian_epsilon(mu=1.0, delta=1e-5), 3)
        4.377
    """
    if not mu >= 0:
        raise ValueError(f"mu must be ≥ 0, got {mu}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    from scipy.optimize import brentq  # takes most of a second to import

    # At the upper end the first term of δ(ε), Φ(μ/2 − ε/μ), alone equals δ.
    highest = mu * (mu / 2 - float(ndtri(delta)))
    found = brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-13 * highest)
    return min(highest, float(found) * (1 + 1e-12))  # on the side that holds


@dataclass(frozen=True)
class CanaryEstimate:
    """What canaries show of a mechanism.

    Attributes:
        epsilon: the empirical ε; an estimate, and no bound.
        lower: the same at the mean's lower limit of 95 % (one-sided).
        mean: of the canaries' cosines.
        std: of the canaries' cosines.
        delta: δ of both.
    """

    epsilon: float
    lower: float
    mean: float
    std: float
    delta: float


def canary(like: Params, max_norm: float, index: int, seed: int) -> Params:
    """The update of canary ``index``: a uniformly random direction of norm ``max_norm``.

    Andrew et al. (2023, section 4). A client that plays it sends it in place of an update of its
    own; nothing of it is private, so that a seed may make it.
    """
    generator = torch.Generator().manual_seed((seed << 20) + index)
    draws = {k: torch.randn(v.shape, generator=generator) for k, v in like.items()}
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in draws.values()))
    return {k: (v * (max_norm / norm)).to(like[k].dtype) for k, v in draws.items()}


def canary_epsilon(
    cosines: Float[Tensor, " k"], dimension: int, delta: float = 1e-5
) -> CanaryEstimate:
    """Empirical ε of one training run, from canaries that took part in it.

    Andrew et al. (2023, algorithm 2): the cosine of a random direction with an independent
    vector is N(0, 1/d), and that of a canary with what was released is larger by its influence.
    ε is what tells N(0, 1/d) from the normal distribution of the canaries' own cosines. One run
    is enough, as independent directions are nearly orthogonal. Where the cosines' spread differs
    from √(1/d) by less than three standard errors, it is taken as √(1/d), the Gaussian
    mechanism's: a spread that is estimated from few canaries decides the tails, and with them ε.

    Args:
        cosines: of k ≥ 2 canaries with the release: the model's change over the training, or one
            round's aggregate.
        dimension: d, the number of parameters.
        delta: in (0, 1).
    """
    if len(cosines) < 2:
        raise ValueError(f"at least 2 canaries are needed, got {len(cosines)}.")
    values = cosines.double()
    mean, std = float(values.mean()), float(values.std())
    null = 1 / math.sqrt(dimension)
    lower = max(mean - 1.645 * std / math.sqrt(len(values)), 0.0)
    alike = abs(std / null - 1) < 3 / math.sqrt(2 * (len(values) - 1))
    shift, spread = 1 / null, 1.0 if alike else std / null
    return CanaryEstimate(
        epsilon=_epsilon_between(shift * max(mean, 0.0), spread, delta),
        lower=_epsilon_between(shift * lower, spread, delta),
        mean=mean,
        std=std,
        delta=delta,
    )


def _epsilon_between(shift: float, spread: float, delta: float) -> float:
    """The smallest ε at which N(shift, spread²) and N(0, 1) are (ε, δ)-close, both ways round."""
    if spread == 1:
        return gaussian_epsilon(shift, delta)
    low, high = 0.0, 1.0

    def divergence(epsilon: float) -> float:
        return max(
            _hockey_stick(shift, spread, 0.0, 1.0, epsilon),
            _hockey_stick(0.0, 1.0, shift, spread, epsilon),
        )

    while divergence(high) > delta:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    return high


def _hockey_stick(m0: float, s0: float, m1: float, s1: float, epsilon: float) -> float:
    """∫ (p − e^ε q)₊ for p = N(m0, s0²), q = N(m1, s1²).

    p > e^ε q where a x² + b x + c > 0, the difference of the two log-densities less ε.
    """
    a = (1 / s1**2 - 1 / s0**2) / 2
    b = m0 / s0**2 - m1 / s1**2
    c = (m1**2 / s1**2 - m0**2 / s0**2) / 2 + math.log(s1 / s0) - epsilon

    def mass(low: float, high: float) -> float:
        p, q = _log_mass(low, high, m0, s0), _log_mass(low, high, m1, s1) + epsilon
        return math.exp(p) * -math.expm1(min(0.0, q - p)) if p > -math.inf else 0.0

    root = b * b - 4 * a * c
    if abs(a) < 1e-12:
        if b == 0:
            return 0.0
        return mass(-c / b, math.inf) if b > 0 else mass(-math.inf, -c / b)
    if root <= 0:
        return 0.0 if a < 0 else mass(-math.inf, math.inf)
    first, second = sorted(((-b - math.sqrt(root)) / (2 * a), (-b + math.sqrt(root)) / (2 * a)))
    if a < 0:
        return mass(first, second)
    return mass(-math.inf, first) + mass(second, math.inf)


def _log_mass(low: float, high: float, mean: float, std: float) -> float:
    """Log P(low < x < high) of N(mean, std²), exact in both tails."""
    near, far = (low - mean) / std, (high - mean) / std
    if near > 0:
        near, far = -far, -near
    if near == far:
        return -math.inf
    upper, lower = float(log_ndtr(far)), float(log_ndtr(near))
    return upper + math.log(-math.expm1(min(lower - upper, -1e-300)))
