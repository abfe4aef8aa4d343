"""How well one quantity follows another: correlation coefficients with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Kind = Literal["spearman", "pearson"]


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient of n pairs.

    Attributes:
        kind: which coefficient.
        coefficient: in [−1, 1]; ``None`` where it is not defined.
        low: lower end of the confidence interval; ``None`` where it is not defined.
        high: upper end, likewise.
        p_value: probability of a coefficient at least as far from zero if the two quantities are
            independent; ``None`` where there is no coefficient.
        confidence: level of the interval.
        n: pairs used.
        note: why a number is missing; mostly empty.
    """

    kind: Kind
    coefficient: float | None
    low: float | None
    high: float | None
    p_value: float | None
    confidence: float
    n: int
    note: str = ""


def spearman(
    x: Sequence[float | None], y: Sequence[float | None], confidence: float = 0.95
) -> Correlation:
    """Spearman's ρ: the linear correlation of ranks; equal values share their mean rank.

    SciPy has no interval for ρ. It is ``tanh(artanh ρ ± z·√((1 + ρ²/2) / (n − 3)))`` here, with
    the variance of artanh ρ by Bonett and Wright (2000, eq. 3) and z the normal quantile; it takes
    5 pairs. The p-value is that of the t approximation.

    Args:
        x: one value a sample; pairs with a missing or non-finite value are left out.
        y: likewise.
        confidence: level of the interval, in (0, 1).

    Raises:
        ValueError: lengths differ, or ``confidence`` lies outside (0, 1).

    Example:
        >>> found = spearman([1, 2, 3, 4], [10, 20, 40, 30])
        >>> round(found.coefficient, 3), round(found.p_value, 3), found.note
        (0.8, 0.2, 'no interval: needs 5 pairs')
    """
    return _correlate("spearman", x, y, confidence)


def pearson(
    x: Sequence[float | None], y: Sequence[float | None], confidence: float = 0.95
) -> Correlation:
    """Pearson's r, with Fisher's interval ``tanh(artanh r ± z / √(n − 3))``, which takes 4 pairs.

    Args:
        x: one value a sample; pairs with a missing or non-finite value are left out.
        y: likewise.
        confidence: level of the interval, in (0, 1).

    Raises:
        ValueError: lengths differ, or ``confidence`` lies outside (0, 1).
    """
    return _correlate("pearson", x, y, confidence)


def _correlate(
    kind: Kind, x: Sequence[float | None], y: Sequence[float | None], confidence: float
) -> Correlation:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}.")
    left, right = _complete_pairs(x, y)
    n = len(left)
    if n < 3:
        return Correlation(kind, None, None, None, None, confidence, n, f"needs 3 pairs, got {n}")
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        note = "undefined: one of the quantities is constant"
        return Correlation(kind, None, None, None, None, confidence, n, note)
    from scipy import stats  # takes a second to import

    found = (stats.spearmanr if kind == "spearman" else stats.pearsonr)(left, right)
    coefficient, p_value = float(found.statistic), float(found.pvalue)
    needed = 5 if kind == "spearman" else 4
    # Of ranks that agree, SciPy's ρ may be off 1 by rounding.
    if n < needed or abs(coefficient) >= 1 - 1e-12:
        why = f"needs {needed} pairs" if n < needed else "a perfect correlation"
        note = f"no interval: {why}"
        return Correlation(kind, coefficient, None, None, p_value, confidence, n, note)
    if kind == "spearman":
        low, high = _bonett_wright(coefficient, n, confidence)
    else:
        low, high = map(float, found.confidence_interval(confidence))
    return Correlation(kind, coefficient, low, high, p_value, confidence, n)


def _bonett_wright(rho: float, n: int, confidence: float) -> tuple[float, float]:
    half = ndtri((1 + confidence) / 2) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


def _complete_pairs(
    x: Sequence[float | None], y: Sequence[float | None]
) -> tuple[NDArray, NDArray]:
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same length, got {len(x)} and {len(y)}.")
    # As floats, ``None`` is NaN.
    pairs = np.stack([np.array(x, dtype=float), np.array(y, dtype=float)])
    left, right = pairs[:, np.isfinite(pairs).all(0)]
    return left, right
