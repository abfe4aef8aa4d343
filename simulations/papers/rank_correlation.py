"""Rank correlations averaged over networks, with intervals, and what they say of a claim."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from simulations.papers.findings import Claim
from simulations.papers.judge import decide


@dataclass(frozen=True)
class RankCorrelations:
    """Spearman's ρ between all pairs of columns, the mean over tables.

    A table in which a column is constant has no ρ of it, and does not count in that mean.

    Attributes:
        columns: names.
        each: (T, k, k) of every table.
        draws: (D, k, k) means over tables of rows drawn with replacement.
        units: how many independent ones there are, which the draws are of: the rows that any table
            uses, as the rows of all tables are of the same images, or the clusters of rows.
    """

    columns: tuple[str, ...]
    each: NDArray
    draws: NDArray
    units: int

    def rho(self, left: str, right: str) -> float:
        """The mean of ρ over the tables."""
        return float(_mean(self.each[:, self._at(left), self._at(right)]))

    def interval(self, left: str, right: str) -> tuple[float, float]:
        """Its 95 % percentile interval."""
        return _percentiles(self.draws[:, self._at(left), self._at(right)])

    def more(self, left: str, other: str, right: str) -> tuple[float, float, float]:
        """ρ(left, right) − ρ(other, right) with its interval: the rows drawn are the same."""
        difference = (
            self.draws[:, self._at(left), self._at(right)]
            - self.draws[:, self._at(other), self._at(right)]
        )
        return self.rho(left, right) - self.rho(other, right), *_percentiles(difference)

    def gap(self, left: str, right: str, other: str) -> tuple[float, float, float]:
        """ρ(left, right) − ρ(left, other) with its interval."""
        return self.more(right, other, left)

    def _at(self, name: str) -> int:
        return self.columns.index(name)


def rank_correlations(
    columns: Sequence[str],
    tables: Sequence[NDArray],
    num_draws: int,
    seed: int,
    clusters: Sequence[int] | None = None,
) -> RankCorrelations:
    """ρ of each table, and bootstrap draws of the mean over the tables.

    The same rows are drawn from every table: they are the same images for other networks. Rows
    with an entry that is not finite are left out of their table.

    Args:
        columns: k names.
        tables: (n, k) each, of the same n rows.
        num_draws: D.
        seed: of the draws.
        clusters: (n,) the unit that each row belongs to; a unit is drawn with all of its rows, as
            those of one batch at several epochs are not independent. By default each row is one.
    """
    generator = np.random.default_rng(seed)
    labels = np.arange(len(tables[0])) if clusters is None else np.asarray(clusters)
    members = [np.flatnonzero(labels == one) for one in np.unique(labels)]
    each = np.stack([_spearman(table) for table in tables])
    draws = []
    for _ in range(num_draws):
        taken = generator.integers(len(members), size=len(members))
        chosen = np.concatenate([members[place] for place in taken])
        draws.append(_mean(np.stack([_spearman(table[chosen]) for table in tables])))
    used = np.any([np.isfinite(table).all(1) for table in tables], axis=0)
    units = len(np.unique(labels[used]))
    return RankCorrelations(tuple(columns), each, np.stack(draws), units)


def _spearman(table: NDArray) -> NDArray:
    kept = table[np.isfinite(table).all(1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.corrcoef(rankdata(kept, axis=0), rowvar=False)


def _mean(each: NDArray) -> NDArray:
    """The mean over tables of what is defined; NaN where nothing is."""
    known = np.isfinite(each)
    count = known.sum(0)
    total = np.where(known, each, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _percentiles(draws: NDArray) -> tuple[float, float]:
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return float("nan"), float("nan")
    low, high = np.percentile(finite, [2.5, 97.5])
    return float(low), float(high)


def judge_positive(
    text: str,
    paper: str,
    ours: float,
    low: float,
    high: float,
    n: int,
    reason: str = "",
    size: float | None = None,
) -> Claim:
    """A claim that a number is positive: :func:`simulations.papers.judge.decide`."""
    return decide(text, paper, (ours, low, high), n, 0.0, math.inf, reason, size)
