"""Whether reconstructions tell their originals from other images more often than chance does."""

from collections.abc import Sequence

from scipy.stats import binom

from flwr_leakage.report.attempts import Attempt
from flwr_leakage.report.index import median

SURE = 0.01
"""A share of identified originals that chance reaches more rarely is no chance."""


def beyond_chance(found: Sequence[Attempt]) -> bool:
    """Whether originals are identified more often than a guess among the candidates does."""
    ranked = [attempt for attempt in found if attempt.rank is not None]
    pools = [candidates(attempt) for attempt in ranked]
    size = median([pool for pool in pools if pool > 1])
    if not ranked or size is None:
        return False
    first = sum(attempt.rank == 1 for attempt in ranked)
    return bool(binom.sf(first - 1, len(ranked), 1 / size) < SURE)


def candidates(attempt: Attempt) -> int:
    """Among how many images the original was looked for; 0 where that is not known."""
    return int("".join(filter(str.isdigit, attempt.candidates)) or 0)
