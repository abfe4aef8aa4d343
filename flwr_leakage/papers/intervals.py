"""Means and differences with their 95 % intervals, by the percentile bootstrap."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_leakage.papers.findings import Row

RESAMPLES = 4000


def mean_interval(values: Sequence[float | None], seed: int = 0) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % interval (Efron and Tibshirani 1993, chapter 13).

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


def unpaired_difference(
    first: Sequence[float | None], second: Sequence[float | None], seed: int = 0
) -> tuple[float, float, float]:
    """The difference of two means, first − second, of different samples, with its 95 % interval.

    Args:
        first: independent values; ``None`` are left out.
        second: likewise.
        seed: of the resamples.

    Raises:
        ValueError: fewer than two values are left of one.
    """
    generator = np.random.default_rng(seed)
    resampled, centre = [], []
    for values in (_present(first), _present(second)):
        if len(values) < 2:
            raise ValueError(f"an interval needs at least 2 values, got {len(values)}.")
        draws = generator.integers(len(values), size=(RESAMPLES, len(values)))
        resampled.append(values[draws].mean(1))
        centre.append(values.mean())
    low, high = np.quantile(resampled[0] - resampled[1], [0.025, 0.975])
    return float(centre[0] - centre[1]), float(low), float(high)


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
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
