"""Test by permutation whether two quantities rank the same units alike."""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ARRANGEMENTS = math.factorial(7)
"""The largest number of permutations that a test goes through completely: those of seven units. If
there are more, the test draws this number of random ones, and its p-value is at least 1/5,041."""


MAX_RANKS = 10_000_000
"""The largest total number of ranks in all random permutations of one test, which bounds its time
to about a second. With more than ``MAX_RANKS / ARRANGEMENTS`` units, fewer permutations are
drawn."""


@dataclass(frozen=True)
class RankAgreement:
    """The agreement of two quantities in ranking the same units, such as clients, within rounds.

    Attributes:
        coefficient: the rank correlation within rounds, in [−1, 1]; ``None`` where no round has two
            units to compare, or where one of the quantities ranks all units equal.
        p_value: the probability of a coefficient at least as far from zero if the two quantities
            are unrelated; ``None`` if ``coefficient`` is ``None``.
        least: the smallest p-value that is possible for this number of units in each round: that of
            two quantities that rank all units alike.
        n: the number of units that were compared.
    """

    coefficient: float | None
    p_value: float | None
    least: float
    n: int


def rank_agreement(seen: Iterable[tuple[int, Hashable, float, float]]) -> RankAgreement:
    """Test by permutation whether two quantities rank units, such as clients, alike within rounds.

    Each unit counts once, in the round with the most units of those in which it was seen. Let a and
    b be the vectors of the units' ranks in x and in y within their round, each less the round's
    mean rank. The coefficient is ``⟨a, b⟩ / (‖a‖‖b‖)``, which is Spearman's ρ for a single round.
    The p-value is the share of all permutations of units within rounds whose coefficient is at
    least as far from zero (Fisher 1935). If there are more than ``ARRANGEMENTS`` permutations, the
    share is that among as many random ones and the observed order (Phipson and Smyth 2010).

    ``seen`` are tuples of a round, a unit, and the unit's values x and y in that round.

    Example:
        >>> found = rank_agreement([(1, "a", 1, 9), (1, "b", 2, 8), (1, "c", 3, 5), (2, "a", 9, 0)])
        >>> found.n, found.coefficient, round(found.p_value, 3)
        (3, -1.0, 0.333)
    """
    from scipy.stats import rankdata  # imported here, as that takes a second

    by_unit: dict[Hashable, dict[int, tuple[float, float]]] = {}
    for when, unit, x, y in seen:
        by_unit.setdefault(unit, {})[when] = (x, y)
    units_in = Counter(when for rounds in by_unit.values() for when in rounds)
    by_round: dict[int, list[tuple[float, float]]] = {}
    for rounds in by_unit.values():
        chosen = max(rounds, key=lambda when: (units_in[when], -when))
        by_round.setdefault(chosen, []).append(rounds[chosen])
    blocks = [rankdata(pairs, axis=0) for pairs in by_round.values() if len(pairs) > 1]
    sizes = [len(block) for block in blocks]
    orders = 1
    # The count of permutations ends at 2^64: any number above ``ARRANGEMENTS`` makes the test draw.
    for size in sizes:
        orders = min(orders * math.factorial(min(size, 20)), 2**64)
    n, least = sum(sizes), min(1.0, 2 / orders)
    if not blocks:
        return RankAgreement(None, None, least, n)
    left, right = np.concatenate([block - block.mean(0) for block in blocks]).T
    scale = math.sqrt(float(left @ left) * float(right @ right))
    if scale == 0:
        return RankAgreement(None, None, least, n)
    found, hits, tried = float(left @ right) / scale, 0, 0
    for places in _arrangements(sizes, drawn=orders > ARRANGEMENTS):
        hits += int((np.abs(right[places] @ left) / scale >= abs(found) - 1e-9).sum())
        tried += len(places)
    return RankAgreement(found, hits / tried, least, n)


def _arrangements(sizes: Sequence[int], drawn: bool) -> Iterable[NDArray]:
    """Yield arrays of indices, each row of which permutes units within consecutive blocks (rounds)
    of the given sizes. All permutations are yielded; or, if ``drawn``, the identity and then up to
    ``ARRANGEMENTS`` random ones, one row at a time.
    """
    starts = np.cumsum([0, *sizes])
    if not drawn:
        blocks = [
            itertools.permutations(range(start, start + size))
            for start, size in zip(starts, sizes, strict=False)
        ]
        yield np.array([sum(parts, ()) for parts in itertools.product(*blocks)])
        return
    draws, block = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    yield np.arange(len(block))[None]
    for _ in range(min(ARRANGEMENTS, MAX_RANKS // len(block))):
        yield np.argsort(block + draws.random(len(block)))[None]
