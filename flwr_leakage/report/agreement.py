"""Whether a risk score ranks samples as the attack's outcome does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from flwr_leakage.report.index import Index, label, median, values

OUTCOMES = ("psnr", "rmse", "mse")


@dataclass(frozen=True)
class Agreement:
    """One score against one outcome.

    Attributes:
        score: the score's name.
        outcome: the metric's name.
        unit: of the outcome.
        pairs: (score, outcome) of each sample that has both.
        rho: Spearman's rank correlation, or ``None``.
        interval: its 95 % interval, or ``None``.
        p_value: of no correlation, two-sided, or ``None``.
        within_rounds: the median of Spearman's ρ over the rounds with at least 4 pairs: a score
            and an outcome that both drift as the model trains correlate over all rounds without
            any use within one.
        direction: what the score claims.
        reading: how to read ρ, in words.
    """

    score: str
    outcome: str
    unit: str
    pairs: tuple[tuple[float, float], ...]
    rho: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    within_rounds: float | None
    direction: str
    reading: str


def spearman(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return Spearman's ρ and its two-sided p-value (t approximation).

    ``None`` for fewer than 4 pairs or where one side is constant.

    Example:
        >>> rho, p_value = spearman([(1, 10), (2, 20), (3, 40), (4, 30)])
        >>> round(rho, 3), round(p_value, 3)
        (0.8, 0.2)
    """
    if len(pairs) < 4:
        return None
    left, right = np.asarray(pairs, dtype=float).T
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    result = stats.spearmanr(left, right)
    return float(result.statistic), float(result.pvalue)


def spearman_interval(rho: float, num_pairs: int) -> tuple[float, float] | None:
    """Return the 95 % interval of Spearman's ρ by Fisher's transform.

    The standard error of artanh ρ is √((1 + ρ²/2) / (n − 3)) (Bonett and Wright 2000, eq. 3).
    ``None`` where |ρ| = 1 or n < 5: the approximation says nothing there.
    """
    if num_pairs < 5 or abs(rho) >= 1 - 1e-12:
        return None
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (num_pairs - 3))
    return math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


def agreements(index: Index) -> list[Agreement]:
    """Compare every score with PSNR, or where there is none with RMSE or MSE."""
    outcome = next((name for name in OUTCOMES if values(index.series("metric", name))), None)
    if outcome is None:
        return []
    return [_agreement(index, score, outcome) for score in index.names("score")]


def _agreement(index: Index, score: str, outcome: str) -> Agreement:
    keyed = _pairs(index, score, outcome)
    pairs = tuple(pair for _, pair in keyed)
    by_round: dict[int, list[tuple[float, float]]] = {}
    for server_round, pair in keyed:
        by_round.setdefault(server_round, []).append(pair)
    within = [found[0] for group in by_round.values() if (found := spearman(group))]
    first = next(iter(index.series("score", score).values()))
    unit = next(iter(index.series("metric", outcome).values())).unit
    found = spearman(pairs)
    rho, p_value = found if found else (None, None)
    interval = spearman_interval(rho, len(pairs)) if rho is not None else None
    typical = median(within)
    reading = _reading(rho, interval, typical, first.direction, outcome)
    return Agreement(
        score, outcome, unit, pairs, rho, interval, p_value,
        typical, first.direction, reading,
    )  # fmt: skip


def _pairs(index: Index, score: str, outcome: str) -> list[tuple[int, tuple[float, float]]]:
    """Pair by sample; a score of a whole client is paired with its median outcome."""
    metric = index.series("metric", outcome)
    by_client: dict[tuple[int, int], list[float]] = {}
    for key, record in metric.items():
        if record.value is not None:
            by_client.setdefault(key[:2], []).append(record.value)
    pairs = []
    for key, record in sorted(index.series("score", score).items()):
        if key in metric:
            result = metric[key].value
        else:
            result = median(by_client.get(key[:2], [])) if key[2] < 0 else None
        if record.value is not None and result is not None:
            pairs.append((key[0], (record.value, result)))
    return pairs


def _reading(
    rho: float | None,
    interval: tuple[float, float] | None,
    within_rounds: float | None,
    direction: str,
    outcome: str,
) -> str:
    if rho is None:
        return "Too few pairs, or all equal: no rank correlation."
    if direction not in ("larger is safer", "larger leaks more", "smaller is safer"):
        return "The score claims no direction."
    leak_sign = 1 if direction in ("larger leaks more", "smaller is safer") else -1
    expected = leak_sign if outcome == "psnr" else -leak_sign
    sign = "positive" if expected > 0 else "negative"
    claim = f"The score claims “{direction}”: ρ with {label(outcome)} should be {sign}."
    if interval is None:
        return f"{claim} There are too few pairs for an interval."
    if interval[0] <= 0 <= interval[1]:
        return f"{claim} The interval contains 0: this run does not tell."
    if rho * expected > 0:
        drift = within_rounds is not None and within_rounds * expected < rho * expected / 2
        but = " Within single rounds most of that is gone: both drift over the rounds."
        return f"{claim} It is: the score ranks the samples as the attack does.{but * drift}"
    return f"{claim} It is not: the score ranks the samples backwards."
