"""Compute the guarantee (ε, δ) of Gaussian noise on an update, and estimate it from canaries.

Everything follows from one number. Adding N(0, σ²) to a sum that one client can move by at most
Δ in norm, T times, is as private as telling N(0, 1) from N(μ, 1) with

    μ = √T Δ / σ                                                                     (1)

(Gaussian differential privacy, Dong, Roth and Su 2022, corollary 3.3: exact, no approximation).
``flwr_leakage.bounds`` tells which guesses and images that leaves to an attacker.

An ε means nothing without its adjacency, which says which two sets of records are to look alike.
``replace-one``: one record is another; both sets have the same size, so that the size may be
public. ``add-or-remove``: one record is there or not. Where each record is clipped to norm C, the
sum moves by at most 2C in the first case, and by C in the second.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import log_ndtr, ndtri
from torch import Tensor

from flwr_leakage.params import Params

Adjacency = Literal["replace-one", "add-or-remove"]
"""The two kinds of neighbouring sets of records that an ε may compare."""

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)

_BISECTIONS = 100

_ORDERS = (*(1 + x / 20 for x in range(1, 200)), *range(11, 64), 80, 96, 128, 192, 256, 384, 512)
"""Orders α of Rényi divergences: those of Opacus, and others below, between and above them."""

_LONGEST_GRID = 1 << 19
"""Points of a grid: 4 MB an array, and less than a tenth of a second an order."""


def check_adjacency(adjacency: str) -> None:
    """Raise ``ValueError`` unless the text names an adjacency."""
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}.")


def dp_epsilon(
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "replace-one",
) -> float:
    """Return ε of (ε, δ)-privacy of steps that add Gaussian noise to a sum of clipped rows.

    Without sampling it is exact, by (1) with Δ = 2C for ``replace-one`` and Δ = C for
    ``add-or-remove``. With Poisson sampling it is the bound of Opacus' Rényi accountant (Mironov et
    al. 2019), whose divergence of a step is that of :func:`replace_one_rdp` for ``replace-one``,
    which Opacus does not have. The sampling rate, the number of steps and the divisor of the sum
    are public, and the same for both sets of records.

    Args:
        noise_multiplier: standard deviation of the noise over the clipping norm C, ≥ 0.
        sample_rate: the chance with which a record enters a step, on its own and anew in each step,
            in (0, 1]; 1 where the record is in all of the steps that are counted.
        num_steps: steps in total, ≥ 0.
        delta: δ in (0, 1).
        adjacency: ``replace-one`` or ``add-or-remove``.

    Raises:
        ImportError: ``sample_rate`` is below 1, and Opacus is not installed.

    Example:
        >>> [round(dp_epsilon(2.0, 1.0, 1, 1e-5, each), 3) for each in ADJACENCIES]
        [4.377, 1.993]
    """
    check_adjacency(adjacency)
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier must be ≥ 0, got {noise_multiplier}.")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}.")
    if num_steps < 0:
        raise ValueError(f"num_steps must be ≥ 0, got {num_steps}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if noise_multiplier == 0:
        return math.inf if num_steps else 0.0
    moved = 2.0 if adjacency == "replace-one" else 1.0
    # An attacker who does not know the sampling cannot tell more than one who does.
    unsampled = gaussian_epsilon(math.sqrt(num_steps) * moved / noise_multiplier, delta)
    if sample_rate == 1 or num_steps == 0:
        return unsampled
    try:
        from opacus.accountants.analysis import rdp as opacus
    except ImportError as error:
        raise ImportError(
            "accounting the ε of Poisson sampling needs Opacus: pip install 'flwr-leakage[opacus]' "
            "(or set delta to null)"
        ) from error
    if adjacency == "replace-one":
        spent = num_steps * replace_one_rdp(sample_rate, noise_multiplier, _ORDERS)
    else:
        spent = opacus.compute_rdp(
            q=sample_rate, noise_multiplier=noise_multiplier, steps=num_steps, orders=_ORDERS
        )
    # the warning says that a wider range of orders might give a smaller bound
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")
        bound, _ = opacus.get_privacy_spent(orders=_ORDERS, rdp=spent, delta=delta)
    return min(unsampled, max(0.0, float(bound)))


def replace_one_rdp(
    sample_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> Float[np.ndarray, " k"]:
    """Return the Rényi divergences of one Poisson-sampled Gaussian step under replaced records.

    D_α(A ‖ B) of A = (1 − q) N(0, σ²) + q N(1, σ²) and B = (1 − q) N(0, σ²) + q N(−1, σ²). No pair
    of records of norm ≤ 1 is told apart better, in any direction. By joint convexity the other
    records may be held fixed. Take all sets to which N(0, σ²) gives the same chance. Under the one
    record the half-space in its direction is the likeliest of them, and under the other record the
    half-space against its direction is the least likely. For opposite records of norm 1 it is the
    same half-space, so that every likelihood-ratio test does best on them.

    The integral is a sum over a grid. In units of σ, with s = 1/σ, the slope of the integrand's
    logarithm is −z plus a number in [0, (2α − 1)s]: outside of [−12, (2α − 1)s + 12] lies less than
    e⁻⁷² of it. An order whose grid would be too long gets ∞, which is a bound, too.

    Args:
        sample_rate: q in (0, 1].
        noise_multiplier: σ > 0.
        orders: α > 1, k of them.
    """
    scale = 1 / noise_multiplier
    spacing = 0.1 / max(1.0, scale)
    found = np.full(len(orders), math.inf)
    for index, order in enumerate(orders):
        end = (2 * order - 1) * scale + 12
        if (end + 12) / spacing > _LONGEST_GRID:
            continue
        z = np.arange(-12, end + spacing, spacing)
        ratio = scale * z - scale**2 / 2
        stays = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
        first = np.logaddexp(stays, math.log(sample_rate) + ratio)
        second = np.logaddexp(stays, math.log(sample_rate) + ratio - 2 * scale * z)
        exponents = order * first + (1 - order) * second - z**2 / 2
        top = exponents.max()
        integral = top + math.log(np.exp(exponents - top).sum() * spacing / math.sqrt(2 * math.pi))
        found[index] = max(0.0, integral) / (order - 1)
    return found


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ at which a μ-Gaussian mechanism is (ε, δ)-differentially private.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle and Wang 2018, theorem 8).
    """
    if mu == 0:
        return 0.0
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε at which a μ-Gaussian mechanism is (ε, δ)-differentially private.

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
    from scipy.optimize import brentq  # the import takes most of a second

    # At the upper end the first term of δ(ε), Φ(μ/2 − ε/μ), alone equals δ.
    highest = mu * (mu / 2 - float(ndtri(delta)))
    found = brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-13 * highest)
    return min(highest, float(found) * (1 + 1e-12))  # rounded up, which is the safe side


@dataclass(frozen=True)
class CanaryEstimate:
    """The estimate of a mechanism's ε from canaries.

    Attributes:
        epsilon: the empirical ε; an estimate, and no bound.
        lower: the same at the mean's lower limit of 95 % (one-sided).
        mean: the mean of the canaries' cosines.
        std: the standard deviation of the canaries' cosines.
        delta: δ of both.
    """

    epsilon: float
    lower: float
    mean: float
    std: float
    delta: float


def canary(like: Params, max_norm: float, index: int, seed: int) -> Params:
    """Return the update of canary ``index``: a uniformly random direction of norm ``max_norm``.

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
    """Return the empirical ε of one training run, from canaries that took part in it.

    The adjacency is add-or-remove: a canary takes part or not.

    Andrew et al. (2023, algorithm 2): the cosine of a random direction with an independent
    vector is N(0, 1/d), and that of a canary with what was released is larger by its influence.
    ε is what tells N(0, 1/d) from the normal distribution of the canaries' own cosines. One run
    is enough, as independent directions are nearly orthogonal. Where the cosines' spread differs
    from √(1/d) by less than three standard errors, it is taken as √(1/d), the Gaussian
    mechanism's: a spread that is estimated from few canaries decides the tails, and with them ε.

    Args:
        cosines: the cosines of k ≥ 2 canaries with the release: the model's change over the
            training, or one round's aggregate.
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
    """Return the smallest ε for which N(shift, spread²) and N(0, 1) are (ε, δ)-close both ways."""
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
    """Return ∫ (p − e^ε q)₊ for p = N(m0, s0²), q = N(m1, s1²).

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
