"""Judgements from intervals, by one rule for all experiments."""

import math
import re
from collections.abc import Sequence

from scipy.special import ndtr

from simulations.papers.findings import FEWEST, Claim, Judgement, too_few, verdict
from simulations.papers.intervals import difference_interval

Interval = tuple[float, float, float]
"""A value and the ends of its 95 % interval."""

HALF = 1.959964
"""Standard errors from the value to an end of the interval, by the normal distribution."""
POWERED = HALF + 0.841621
"""Standard errors from an effect to the line at which the interval decides in 80 of 100 samples."""


def decide(
    text: str,
    paper: str,
    found: Interval,
    n: int,
    least: float = -math.inf,
    most: float = math.inf,
    reason: str = "",
    size: float | None = None,
) -> Claim:
    """A claim that a number lies in ``least`` … ``most``, judged by its interval.

    See :func:`simulations.papers.findings.verdict`. A claim of a sign of which the paper prints the
    size also does not hold where the whole interval lies below half of this size.

    The needed n is that of an interval that is as wide as this one times √(this n / that n), and
    decides with a probability of 0.8 if the true number is the paper's, or ours where the paper
    prints none. Of a share that is 0 or 1 it is where the exact interval (Clopper and Pearson 1934)
    of such a share ends at the line.

    Args:
        text: the claim, with its place.
        paper: the paper's number.
        found: ours and its interval.
        n: of independent values.
        least: the smallest number that agrees with the claim.
        most: the largest one.
        reason: what must be known besides.
        size: of the paper's number, where 0 is an end and the paper prints one; ≤ 0 counts as none.
    """
    value, low, high = found
    asked = _asked(least, most)
    if not all(map(math.isfinite, found)):
        why = reason or "no number: it is undefined on these rows"
        return Claim(text, paper, None, None, None, n, Judgement.NOT_COMPARABLE, why, asked)
    lines = ends = [line for line in (least, most) if math.isfinite(line)]
    half = (size / 2 if least == 0 else -size / 2) if size and size > 0 else None
    said = verdict(low, high, least, most)
    small = half is not None and (high < half if half > 0 else low > half)
    if said is Judgement.UNDECIDED and half is not None and small:
        said, lines = Judgement.DOES_NOT_HOLD, [half]
        reason = "; ".join(filter(None, ["less than half of the paper's number", reason]))
    inside = least <= value <= most
    if not inside:  # one line is violated, the nearest
        lines = sorted(lines, key=lambda line: abs(value - line))[:1]
    p = max((_p(found, line, n) for line in lines), default=None)
    effect = value if half is None else 2 * half
    if not least <= effect <= most:
        ends = sorted(ends, key=lambda line: abs(effect - line))[:1]
    needed = max((FEWEST, *(_needed(found, line, n, effect) for line in ends)))
    few = too_few(n)
    why = "; ".join(filter(None, [few, reason]))
    said = Judgement.NOT_COMPARABLE if few else said
    count = math.ceil(needed) if math.isfinite(needed) else None
    return Claim(text, paper, value, low, high, n, said, why, asked, count, p)


def _exact(found: Interval) -> bool:
    """Whether the interval is that of a share that is 0 or 1."""
    return found[0] in (found[1], found[2]) and found[0] in (0.0, 1.0) and found[1] < found[2]


def _error(found: Interval, line: float) -> float:
    """The standard error that the interval's end on the side of the line stands for."""
    value, low, high = found
    return ((value - low) if line < value else (high - value)) / HALF


def _p(found: Interval, line: float, n: int) -> float:
    distance, error = abs(found[0] - line), _error(found, line)
    if _exact(found):
        return min(1.0, 2 * (1 - distance) ** n)
    return 2 * float(ndtr(-distance / error)) if error > 0 else float(distance == 0)


def _needed(found: Interval, line: float, n: int, effect: float) -> float:
    distance = abs(effect - line)
    if distance == 0:
        return math.inf
    if _exact(found):
        return math.log(0.025) / math.log(1 - distance) if distance < 1 else 1.0
    return n * (POWERED * _error(found, line) / distance) ** 2


def _asked(least: float, most: float) -> str:
    if math.isinf(most):
        return f"at least {least:g}"
    return f"at most {most:g}" if math.isinf(least) else f"{least:g} to {most:g}"


def figure_of(text: str) -> str:
    """The paper's figure, table, section or listing that a claim's text names first."""
    place = re.search(
        r"Fig\. \d+|Table \d+|eq\. \d+|section [\d.]*\d|appendix \w|Algorithm \d", text
    )
    return place.group() if place else ""


def together(claims: Sequence[Claim]) -> list[bool | None]:
    """Whether each claim stays decided when all claims of one figure are tested together.

    By Holm's procedure (1979) at 5 %: of m claims of a figure, the one of the i-th smallest p
    stays if p ≤ 0.05/(m − i + 1), and so do all before it. ``None`` where nothing was decided.
    """
    decided = (Judgement.HOLDS, Judgement.DOES_NOT_HOLD)
    stays: list[bool | None] = [None] * len(claims)
    groups: dict[str, list[int]] = {}
    for place, claim in enumerate(claims):
        if claim.p is not None and claim.judgement is not Judgement.NOT_COMPARABLE:
            groups.setdefault(figure_of(claim.text), []).append(place)
    for places in groups.values():
        alive = True
        for rank, place in enumerate(sorted(places, key=lambda at: claims[at].p or 0.0)):
            alive = alive and (claims[place].p or 0.0) <= 0.05 / (len(places) - rank)
            if claims[place].judgement in decided:
                stays[place] = alive
    return stays


def by_sign(
    text: str, paper: str, found: Interval, n: int, expected: float, size: float | None = None
) -> Claim:
    """A claim of a sign, judged by the interval; see :func:`decide`.

    Args:
        text: the claim, with its place.
        paper: the paper's number.
        found: the number and its interval.
        n: of independent values.
        expected: any number of the claimed sign.
        size: of the paper's number, where it prints one.
    """
    least, most = (0.0, math.inf) if expected > 0 else (-math.inf, 0.0)
    return decide(text, paper, found, n, least, most, size=size)


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
    size = None if printed else abs(paper)
    printed = printed or f"{paper:+.2f}"
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a is not None and b is not None]
    if len(first) != len(second) or len(pairs) < 2:
        return not_compared(text, printed, "one of the two was not measured at this size")
    found = difference_interval([a for a, _ in pairs], [b for _, b in pairs])
    return by_sign(text, printed, found, len(pairs), paper, size)


def not_compared(text: str, paper: str, reason: str) -> Claim:
    """A claim that could not be tested, and why."""
    return Claim(text, paper, None, None, None, 0, Judgement.NOT_COMPARABLE, reason)
