"""Means and differences with their 95 % intervals."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from simulations.papers.findings import Row

RESAMPLES = 4000
SMALL = 20
"""Below so many values the percentile bootstrap is too narrow, and Student's t is taken."""


def mean_interval(values: Sequence[float | None], seed: int = 0) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % interval.

    Below 20 values it is ``mean ± t(0.975, n − 1)·s/√n`` with the standard deviation s (Student
    1908), else the percentile bootstrap (Efron and Tibshirani 1993, chapter 13).

    Args:
        values: independent ones; ``None`` are left out.
        seed: of the resamples.

    Raises:
        ValueError: fewer than two values are left.

    Example:
        >>> mean_interval([1.0, 1.0, 1.0])
        (1.0, 1.0, 1.0)
    """
    return _around(_present(values), seed)


def difference_interval(
    first: Sequence[float | None], second: Sequence[float | None], seed: int = 0
) -> tuple[float, float, float]:
    """The mean of first − second over pairs, with its 95 % interval.

    Args:
        first: one value a sample.
        second: of the same samples; pairs with a missing value are left out.
        seed: of the resamples.

    Raises:
        ValueError: the lengths differ, or fewer than two pairs are left.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need equal lengths, got {len(first)} and {len(second)}.")
    pairs = zip(first, second, strict=True)
    return _around(_present([a - b for a, b in pairs if a is not None and b is not None]), seed)


def share_interval(count: int, n: int) -> tuple[float, float, float]:
    """The share count/n and its exact 95 % interval (Clopper and Pearson 1934).

    Unlike a bootstrap it has a width where all of the n are alike.

    Example:
        >>> [round(value, 3) for value in share_interval(10, 10)]
        [1.0, 0.692, 1.0]
    """
    found = stats.binomtest(count, n).proportion_ci(method="exact")
    return count / n, float(found.low), float(found.high)


def means(rows: Sequence[Row], names: Sequence[str]) -> Row:
    """The mean of each measure over rows, with its 95 % interval: three cells a measure.

    Args:
        rows: one a sample.
        names: of measures; one that fewer than two rows have is left out.
    """
    cells: Row = {}
    for name in names:
        values = [float(v) for row in rows if (v := row.get(name)) is not None]
        if len(values) > 1:
            found = mean_interval(values)
            cells |= dict(zip((name, f"{name} low", f"{name} high"), found, strict=True))
    return cells


def _present(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=float)


def _around(values: NDArray[np.float64], seed: int) -> tuple[float, float, float]:
    if len(values) < 2:
        raise ValueError(f"an interval needs at least 2 values, got {len(values)}.")
    mean = float(values.mean())
    if len(values) < SMALL:
        quantile = stats.t.ppf(0.975, len(values) - 1)
        half = float(quantile * values.std(ddof=1) / len(values) ** 0.5)
        return mean, mean - half, mean + half
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return mean, float(low), float(high)
