"""Rank and linear correlation of scores with outcomes, with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient of n pairs.

    Attributes:
        kind: which coefficient.
        coefficient: in [−1, 1]; ``None`` where it is not defined.
        low: lower end of the confidence interval; ``None`` where it is not defined.
        high: upper end, likewise.
        confidence: level of the interval.
        n: pairs used.
        note: why a number is missing; mostly empty.
    """

    kind: Literal["spearman", "pearson"]
    coefficient: float | None
    low: float | None
    high: float | None
    confidence: float
    n: int
    note: str = ""


def spearman(
    x: Sequence[float | None], y: Sequence[float | None], confidence: float = 0.95
) -> Correlation:
    """Spearman's ρ: the linear correlation of ranks; ties share their mean rank.

    The interval is Fisher's, ``tanh(artanh ρ ± z·√((1 + ρ²/2) / (n − 3)))``, with the variance
    of Bonett and Wright (2000).

    Args:
        x: one value a sample; pairs with a missing or non-finite value are left out.
        y: likewise.
        confidence: level of the interval, in (0, 1).

    Raises:
        ValueError: lengths differ, or ``confidence`` lies outside (0, 1).
    """
    return _correlate("spearman", x, y, confidence)


def pearson(
    x: Sequence[float | None], y: Sequence[float | None], confidence: float = 0.95
) -> Correlation:
    """Pearson's r, with Fisher's interval ``tanh(artanh r ± z / √(n − 3))``.

    Args:
        x: one value a sample; pairs with a missing or non-finite value are left out.
        y: likewise.
        confidence: level of the interval, in (0, 1).

    Raises:
        ValueError: lengths differ, or ``confidence`` lies outside (0, 1).
    """
    return _correlate("pearson", x, y, confidence)


def _correlate(
    kind: Literal["spearman", "pearson"],
    x: Sequence[float | None],
    y: Sequence[float | None],
    confidence: float,
) -> Correlation:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}.")
    left, right = _complete_pairs(x, y)
    n = len(left)
    if n < 3:
        return Correlation(kind, None, None, None, confidence, n, f"needs 3 pairs, got {n}")
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        note = "undefined: one of the quantities is constant"
        return Correlation(kind, None, None, None, confidence, n, note)
    if kind == "spearman":
        coefficient = float(stats.spearmanr(left, right).statistic)
        variance_factor = 1 + coefficient**2 / 2
    else:
        coefficient = float(stats.pearsonr(left, right).statistic)
        variance_factor = 1.0
    if n == 3 or abs(coefficient) >= 1:
        note = "no interval: needs 4 pairs" if n == 3 else "no interval: a perfect correlation"
        return Correlation(kind, coefficient, None, None, confidence, n, note)
    half = stats.norm.ppf((1 + confidence) / 2) * math.sqrt(variance_factor / (n - 3))
    centre = math.atanh(coefficient)
    low, high = math.tanh(centre - half), math.tanh(centre + half)
    return Correlation(kind, coefficient, low, high, confidence, n)


def _complete_pairs(
    x: Sequence[float | None], y: Sequence[float | None]
) -> tuple[NDArray, NDArray]:
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same length, got {len(x)} and {len(y)}.")
    pairs = np.array(
        [
            [math.nan if value is None else value for value in pair]
            for pair in zip(x, y, strict=True)
        ],
        dtype=np.float64,
    ).reshape(-1, 2)
    complete = pairs[np.isfinite(pairs).all(1)]
    return complete[:, 0], complete[:, 1]
