"""Numbers with intervals, and what follows for a claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from simulations.papers.findings import Claim, Row
from simulations.papers.intervals import share_interval
from simulations.papers.judge import decide, not_compared

Table = Mapping[str, NDArray]
"""Columns of equal length; a missing number is NaN."""


@dataclass(frozen=True)
class Interval:
    """A statistic with its 95 % interval over ``n`` images."""

    value: float
    low: float
    high: float
    n: int


def table_of(rows: Sequence[Row], **wanted: object) -> Table:
    """The columns of the rows in which each named column has the wanted value."""
    chosen = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    names = list(dict.fromkeys(name for row in chosen for name in row))
    columns: dict[str, NDArray] = {}
    for name in names:
        values = [row.get(name) for row in chosen]
        words = any(isinstance(value, str) for value in values)
        columns[name] = np.array(values, dtype=str if words else float)
    return columns


def bootstrap(
    table: Table,
    statistic: Callable[[Table], float],
    unit: str = "image",
    draws: int = 400,
    seed: int = 0,
) -> Interval:
    """A statistic with its percentile bootstrap interval (Efron 1979).

    Images are drawn with replacement, each with all of its rows (seeds, noises), as the rows of one
    image are not independent.

    Args:
        table: with a column named by ``unit``.
        statistic: of a table.
        unit: what is drawn.
        draws: how often.
        seed: of the draws.
    """
    units = table[unit]
    members = [np.flatnonzero(units == one) for one in np.unique(units)]
    random = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        taken = random.integers(len(members), size=len(members))
        rows = np.concatenate([members[place] for place in taken])
        found.append(statistic({name: column[rows] for name, column in table.items()}))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return Interval(float(statistic(table)), float(low), float(high), len(members))


def share(table: Table, holds: Callable[[Table], NDArray], unit: str = "image") -> Interval:
    """The share of rows of which something holds, with its interval over units.

    Where it holds of all rows or of none, resampling them says nothing: the interval is then the
    exact one of as many units, see :func:`simulations.papers.intervals.share_interval`.

    Args:
        table: with a column named by ``unit``.
        holds: one boolean a row of a table.
        unit: what is drawn.
    """
    found = bootstrap(table, lambda t: float(np.mean(holds(t))), unit)
    if found.value not in (0.0, 1.0):
        return found
    return Interval(*share_interval(int(found.value) * found.n, found.n), found.n)


def spearman(table: Table, x: str, y: str) -> float:
    """Spearman's ρ of two columns; NaN where one is constant."""
    kept = np.isfinite(table[x]) & np.isfinite(table[y])
    left, right = table[x][kept], table[y][kept]
    if len(left) < 3 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(stats.spearmanr(left, right).statistic)


def slope(table: Table, x: str, y: str) -> float:
    """Least-squares slope of log y over log x: 1 along the line of equal values."""
    kept = (table[x] > 0) & (table[y] > 0)
    if kept.sum() < 3 or np.ptp(table[x][kept]) == 0:
        return float("nan")
    return float(np.polyfit(np.log(table[x][kept]), np.log(table[y][kept]), 1)[0])


def median_ratio(table: Table, x: str, y: str) -> float:
    """The median of x/y."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nanmedian(table[x] / table[y]))


def without_resnet18(panels: Sequence[Any], text: str, why: str) -> list[Claim]:
    """The claim that a plot of ResNet-18 shows, as not compared; none if a panel has ResNet-18."""
    if any(panel.victim.network == "ResNet18" for panel in panels):
        return []
    return [not_compared(text, "plot only", why)]


def judged(
    text: str,
    paper: str,
    found: Interval,
    least: float = -np.inf,
    most: float = np.inf,
    reason: str = "",
    size: float | None = None,
) -> Claim:
    """A claim that a statistic lies in a range: :func:`simulations.papers.judge.decide`."""
    numbers = found.value, found.low, found.high
    return decide(text, paper, numbers, found.n, least, most, reason, size)
