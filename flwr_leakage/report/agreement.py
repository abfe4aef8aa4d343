"""Whether a risk score ranks samples as the attack's outcome does."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_leakage.correlation import Correlation, spearman
from flwr_leakage.report.index import Index, label, median, values

OUTCOMES = ("psnr", "rmse", "mse")
AVOID = "Do not rely on it here."
MIN_PAIRS = 4
"""Of three pairs in a random order, one in three has ρ = ±1: that says nothing."""


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
        within_rounds: the median of Spearman's ρ over the rounds with at least 4 pairs. A score
            and an outcome that both drift as the model trains correlate over all rounds, which is
            of no use within one.
        direction: what the score claims, for instance that larger values are safer.
        reading: whether ρ bears out that claim, in words.
        holds: whether it does; ``None`` where this run does not tell.
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
    holds: bool | None


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
    rhos = [_rank_correlation(group).coefficient for group in by_round.values()]
    first = next(iter(index.series("score", score).values()))
    unit = next(iter(index.series("metric", outcome).values())).unit
    found = _rank_correlation(pairs)
    interval = None if found.low is None or found.high is None else (found.low, found.high)
    typical = median([rho for rho in rhos if rho is not None])
    holds, reading = _reading(found.coefficient, interval, typical, first.direction, outcome)
    return Agreement(
        score, outcome, unit, pairs, found.coefficient, interval, found.p_value,
        typical, first.direction, reading, holds,
    )  # fmt: skip


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> Correlation:
    enough = pairs if len(pairs) >= MIN_PAIRS else ()
    return spearman([left for left, _ in enough], [right for _, right in enough])


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
) -> tuple[bool | None, str]:
    if rho is None:
        return None, f"Too few pairs, or all equal: no rank correlation. {AVOID}"
    if direction not in ("larger is safer", "larger leaks more", "smaller is safer"):
        return None, "The score claims no direction."
    leak_sign = 1 if direction in ("larger leaks more", "smaller is safer") else -1
    expected = leak_sign if outcome == "psnr" else -leak_sign
    sign = "positive" if expected > 0 else "negative"
    claim = f"The score claims “{direction}”: ρ with {label(outcome)} should be {sign}."
    if interval is None:
        return None, f"{claim} There are too few pairs for an interval. {AVOID}"
    if interval[0] <= 0 <= interval[1]:
        return None, f"{claim} The interval contains 0: this run does not tell. {AVOID}"
    if rho * expected > 0:
        drift = within_rounds is not None and within_rounds * expected < rho * expected / 2
        but = " Within single rounds most of that is gone: both drift over the rounds."
        return True, f"{claim} It is: the score ranks the samples as the attack does.{but * drift}"
    return False, f"{claim} It is not: the score ranks the samples backwards. {AVOID}"


def agreement_told(found: Sequence[Agreement]) -> str:
    """Whether the scores of a run rank its leaks, in a sentence or two."""
    named = {
        held: ", ".join(label(entry.score) for entry in found if entry.holds is held)
        for held in (True, False, None)
    }
    parts = [
        f"{words}: {named[held]}."
        for held, words in (
            (True, "Yes, as they claim"),
            (False, "No, backwards"),
            (None, "This run does not tell about"),
        )
        if named[held]
    ]
    trust = "Rely on no other here." if named[True] else "Rely on none of them here."
    return " ".join((*parts, trust))
