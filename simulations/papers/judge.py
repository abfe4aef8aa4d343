"""Judgements from intervals, by one rule for all experiments."""

import math
from collections.abc import Sequence

from simulations.papers.findings import Claim, Judgement, too_few, verdict
from simulations.papers.intervals import difference_interval

Interval = tuple[float, float, float]
"""A value and the ends of its 95 % interval."""


def by_sign(text: str, paper: str, found: Interval, n: int, expected: float) -> Claim:
    """A claim of a sign, judged by the interval; see :func:`simulations.papers.findings.verdict`.

    Args:
        text: the claim, with its place.
        paper: the paper's number.
        found: the number and its interval.
        n: of independent values.
        expected: any number of the claimed sign.
    """
    value, low, high = found
    if few := too_few(n):
        return Claim(text, paper, value, low, high, n, Judgement.NOT_COMPARABLE, few)
    said = verdict(low, high, *((0.0, math.inf) if expected > 0 else (-math.inf, 0.0)))
    reason = "the interval holds zero" if said is Judgement.UNDECIDED else ""
    return Claim(text, paper, value, low, high, n, said, reason)


def by_difference(
    text: str,
    paper: float,
    first: Sequence[float | None],
    second: Sequence[float | None],
    printed: str | None = None,
) -> Claim:
    """A claim that first − second has the sign of the paper's number, over pairs of samples.

    Args:
        text: the claim, with its place.
        paper: the paper's difference, or any number of the claimed sign where it prints none.
        first: one value a sample.
        second: of the same samples.
        printed: what the paper has, where that is no number.
    """
    printed = printed or f"{paper:+.2f}"
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
    if len(first) != len(second) or len(pairs) < 2:
        return not_compared(text, printed, "one of the two was not measured at this size")
    found = difference_interval([a for a, _ in pairs], [b for _, b in pairs])
    return by_sign(text, printed, found, len(pairs), paper)


def not_compared(text: str, paper: str, reason: str) -> Claim:
    """A claim that could not be tested, and why."""
    return Claim(text, paper, None, None, None, 0, Judgement.NOT_COMPARABLE, reason)
