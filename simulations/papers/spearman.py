"""Spearman's rank correlation of two quantities, with its confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation ρ of n pairs, with its confidence interval.

    Attributes:
        coefficient: ρ in [−1, 1]; ``None`` where it is not defined, as for a constant quantity.
        low: the lower end of the confidence interval, or ``None``.
        high: the upper end of the confidence interval, or ``None``.
        n: the number of pairs used.
        note: why the coefficient or the interval is missing; empty if neither is.
    """

    coefficient: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""


def spearman(
    x: Sequence[float | None], y: Sequence[float | None], confidence: float = 0.95
) -> Correlation:
    """Return Spearman's ρ, the linear correlation of ranks; equal values share their mean rank.

    The interval is ``tanh(artanh ρ ± z·√((1 + ρ²/2) / (n − 3)))``, with the variance of artanh ρ by
    Bonett and Wright (2000, eq. 3) and z the normal quantile. It needs at least 5 pairs. ``x`` and
    ``y`` are values of the same samples in order; a sample is left out if one is missing or not
    finite. ``confidence`` in (0, 1) is the interval's level.

    Raises:
        ValueError: lengths differ, or ``confidence`` lies outside (0, 1).

    Example:
        >>> found = spearman([1, 2, 3, 4], [10, 20, 40, 30])
        >>> round(found.coefficient, 3), found.note
        (0.8, 'no interval: needs 5 pairs')
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}.")
    left, right = _complete_pairs(x, y)
    n = len(left)
    if n < 3:
        return Correlation(None, None, None, n, f"needs 3 pairs, got {n}")
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return Correlation(None, None, None, n, "undefined: one of the quantities is constant")
    from scipy import stats  # imported here, as that takes a second

    rho = float(stats.spearmanr(left, right).statistic)
    # Rounding may move SciPy's ρ off ±1 although all ranks agree, so that a ρ this near counts too.
    if n < 5 or abs(rho) >= 1 - 1e-12:
        why = "needs 5 pairs" if n < 5 else "a perfect correlation"
        return Correlation(rho, None, None, n, f"no interval: {why}")
    half = ndtri((1 + confidence) / 2) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = (math.tanh(math.atanh(rho) + end) for end in (-half, half))
    return Correlation(rho, low, high, n)


def _complete_pairs(
    x: Sequence[float | None], y: Sequence[float | None]
) -> tuple[NDArray, NDArray]:
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same length, got {len(x)} and {len(y)}.")
    # The conversion to float turns ``None`` into NaN, and pairs with NaN are left out.
    pairs = np.stack([np.array(x, dtype=float), np.array(y, dtype=float)])
    left, right = pairs[:, np.isfinite(pairs).all(0)]
    return left, right
