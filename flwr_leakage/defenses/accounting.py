"""Compute the privacy guarantee (ε, δ) of Gaussian noise on an update, or estimate ε.

An estimate uses canaries, which are random updates that some clients send.

Everything follows from one number μ. Consider a sum that one record can change by at most Δ in
norm, released T times with noise N(0, σ²). To tell from the releases whether the record was changed
is as hard as to tell N(0, 1) from N(μ, 1), with

    μ = √T Δ / σ                                                                     (1)

(Gaussian differential privacy, Dong, Roth and Su 2022, corollary 3.3: exact, no approximation).

An ε means nothing without its adjacency. The adjacency says in what two sets of records differ that
must be hard to tell apart. ``replace-one``: one record is replaced by another; both sets have the
same size, so that the size may be public. ``add-or-remove``: one record is in the set or not. If
each record is clipped to norm C, the sum changes by at most 2C for ``replace-one``, and by C for
``add-or-remove``.
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

from flwr_leakage.params import Params, norm

Adjacency = Literal["replace-one", "add-or-remove"]
"""The relations of two sets of records that an ε may compare: one record replaced by another, or
one record added or removed."""

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)

_BISECTIONS = 100

_ORDERS = (*(1 + x / 20 for x in range(1, 200)), *range(11, 64), 80, 96, 128, 192, 256, 384, 512)
"""The orders α of the Rényi divergences over which the smallest ε is sought: those of Opacus'
default, and others below, between and above them. More orders can only make the bound tighter."""

_LONGEST_GRID = 1 << 19
"""The largest number of grid points of the integral in :func:`replace_one_rdp`. An array of this
size takes 4 MB, and the integral for one order less than a tenth of a second."""


def check_adjacency(adjacency: str) -> None:
    """Raise ``ValueError`` unless ``adjacency`` is ``replace-one`` or ``add-or-remove``."""
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}.")


def dp_epsilon(
    noise_multiplier: float,
    sample_rate: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "replace-one",
) -> float:
    """Return ε of the (ε, δ)-differential privacy of steps that add Gaussian noise to a sum of
    clipped gradients.

    Each record's gradient is clipped to norm C. Without sampling, ε is exact: the steps are as
    private as telling N(0, 1) from N(μ, 1) with ``μ = √num_steps Δ / σ`` (Dong, Roth and Su 2022,
    corollary 3.3), where σ is the noise's standard deviation, and Δ = 2C for ``replace-one`` and C
    for ``add-or-remove``. With Poisson sampling it is the upper bound of Opacus' Rényi accountant
    (Mironov et al. 2019). For ``replace-one``, which Opacus does not have, the accountant uses the
    divergence of a step by :func:`replace_one_rdp`. The sampling rate, the number of steps and the
    divisor of the sum are public, and the same for both sets of records.

    Args:
        noise_multiplier: the standard deviation of the noise over the clipping norm C, ≥ 0.
        sample_rate: the probability with which a record enters a step, independently in each step,
            in (0, 1]; 1 if the record is in every step that is counted.
        num_steps: the number of steps in total, ≥ 0.
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
    # The ε without sampling is an upper bound, too, as it can only help an attacker to know which
    # steps took the record. The smaller one of both bounds is returned.
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
    # Opacus' warning that a wider range of orders might give a smaller ε is hidden, as this ε is
    # valid all the same.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")
        bound, _ = opacus.get_privacy_spent(orders=_ORDERS, rdp=spent, delta=delta)
    return min(unsampled, max(0.0, float(bound)))


def replace_one_rdp(
    sample_rate: float, noise_multiplier: float, orders: Sequence[float]
) -> Float[np.ndarray, " k"]:
    """Return the Rényi divergence, at each order, of one Poisson-sampled Gaussian step if one
    record is replaced.

    They are D_α(A ‖ B) of A = (1 − q) N(0, σ²) + q N(1, σ²) and B = (1 − q) N(0, σ²) + q N(−1, σ²),
    in units of the clipping norm. No other pair of records of norm ≤ 1 has a larger divergence. By
    joint convexity the other records may be held fixed. Among all sets of given probability under
    N(0, σ²), a half-space has the largest probability if one record is in the step, and a
    half-space has the smallest if the other record is. For opposite records of norm 1 both are the
    same half-space.

    The integral is a sum over a grid. In units of σ, with s = 1/σ, less than e⁻⁷² of it lies
    outside of [−12, (2α − 1)s + 12]. For an order α whose grid would have more than
    ``_LONGEST_GRID`` points, the result is ∞, an upper bound.

    ``sample_rate`` is the sampling probability q in (0, 1], ``noise_multiplier`` the noise's
    standard deviation σ > 0 in units of the clipping norm, and ``orders`` are k orders α > 1.
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
    """Return the smallest δ at which a μ-Gaussian mechanism is (ε, δ)-differentially private. Such
    a mechanism is as private as telling N(0, 1) from N(μ, 1). It has δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2
    − ε/μ), with Φ the normal distribution function, μ ≥ 0 and ε ≥ 0 (Balle and Wang 2018, theorem
    8).
    """
    if mu == 0:
        return 0.0
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε at which a μ-Gaussian mechanism is (ε, δ)-differentially private.

    Such a mechanism is as private as telling N(0, 1) from N(μ, 1).

    Args:
        mu: μ ≥ 0. For T releases with noise of standard deviation σ and sensitivity Δ, it is √T Δ /
            σ.
        delta: δ in (0, 1).

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
    from scipy.optimize import brentq  # imported here, as the import takes most of a second

    # At ``highest`` the first term of δ(ε), Φ(μ/2 − ε/μ), equals ``delta``, and the second is
    # negative. So the root lies below ``highest``.
    highest = mu * (mu / 2 - float(ndtri(delta)))
    found = brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, highest, xtol=1e-13 * highest)
    return min(highest, float(found) * (1 + 1e-12))  # rounded up, so that ε is not understated


@dataclass(frozen=True)
class CanaryEstimate:
    """An estimate of a training's ε from canaries: random updates that some clients send.

    Attributes:
        epsilon: the empirical ε, which is an estimate and no bound.
        lower: the empirical ε with ``mean`` replaced by its one-sided lower 95 % confidence limit.
        mean: the mean of the cosines of the canaries with the released change of the model.
        std: the standard deviation of these cosines.
        delta: δ of ``epsilon`` and ``lower``.
    """

    epsilon: float
    lower: float
    mean: float
    std: float
    delta: float


def canary(like: Params, max_norm: float, index: int, seed: int) -> Params:
    """Return the update of a canary: a uniformly random direction of norm ``max_norm``.

    A client that plays the canary sends it in place of its own update (Andrew et al. 2023, section
    4). A canary contains nothing private, so that its seed may be known.

    Args:
        like: parameters whose names and shapes the update has.
        max_norm: the Euclidean norm of the update.
        index: the number of the canary, from 0.
        seed: the seed of all canaries.
    """
    generator = torch.Generator().manual_seed((seed << 20) + index)
    draws = {k: torch.randn(v.shape, generator=generator) for k, v in like.items()}
    factor = max_norm / norm(draws.values())
    return {k: (v * factor).to(like[k].dtype) for k, v in draws.items()}


def canary_epsilon(
    cosines: Float[Tensor, " k"], dimension: int, delta: float = 1e-5
) -> CanaryEstimate:
    """Return the empirical ε of one training run, from canary updates that took part in it.

    The adjacency is add-or-remove: a canary takes part or not (Andrew et al. 2023, algorithm 2).

    The cosine of a random direction with an independent vector is distributed as N(0, 1/d). The
    cosine of a canary with the release is larger, by the canary's influence. ε is the smallest
    value for which N(0, 1/d) and the normal distribution fitted to the canaries' cosines are (ε,
    δ)-close. The Gaussian mechanism gives the cosines the standard deviation √(1/d). If theirs
    differs from it by less than three standard errors, √(1/d) is used. Otherwise the error of an
    estimate from few canaries would decide ε, which depends on the tails.

    Args:
        cosines: the cosines of k ≥ 2 canaries with the release: the model's change over the
            training, or one round's aggregate.
        dimension: the number d of parameters.
        delta: δ in (0, 1).
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
    """Return the smallest ε at which N(shift, spread²) and N(0, 1) are (ε, δ)-indistinguishable, in
    either order of the two.
    """
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
    """Return ∫ (p − e^ε q)₊ for densities p of N(m0, s0²) and q of N(m1, s1²).

    The integrand is positive where the quadratic polynomial log p − log q − ε is.
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
    """Return log P(low < x < high) for x ~ N(mean, std²), computed accurately in both tails."""
    near, far = (low - mean) / std, (high - mean) / std
    if near > 0:
        near, far = -far, -near
    if near == far:
        return -math.inf
    upper, lower = float(log_ndtr(far)), float(log_ndtr(near))
    return upper + math.log(-math.expm1(min(lower - upper, -1e-300)))
