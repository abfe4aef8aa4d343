"""Whether reconstructions tell their originals from other images more often than chance does."""

from collections.abc import Sequence

from scipy.stats import binom

from flwr_leakage.report.attempts import Attempt
from flwr_leakage.report.index import count, median

SURE = 0.05
"""A number of identified originals that chance reaches more rarely is no chance."""


def beyond_chance(found: Sequence[Attempt]) -> bool:
    """Whether originals are identified more often than a guess among the candidates does."""
    ranked, most = [attempt for attempt in found if attempt.rank is not None], by_chance(found)
    return most is not None and sum(attempt.rank == 1 for attempt in ranked) > most


def by_chance(found: Sequence[Attempt]) -> int | None:
    """How many originals a guess may identify: more of them it does with probability 5 % at most.

    ``None`` where no original was looked for.
    """
    ranked = [attempt for attempt in found if attempt.rank is not None]
    pools = [candidates(attempt) for attempt in ranked]
    size = median([pool for pool in pools if pool > 1])
    return None if size is None else int(binom.isf(SURE, len(ranked), 1 / size))


def chance_told(found: Sequence[Attempt]) -> str:
    """Up to how many identified originals may be chance, for the condition to train on."""
    most = by_chance(found)
    here = ""
    if most is not None:
        tried = count(sum(attempt.rank is not None for attempt in found), "attempt")
        here = f"with {tried} as here at most {most}; "
    return (
        f"identifies no more originals than chance may give ({here}more would come by chance with "
        f"a probability of 5 % or less; how many the identification misses is not known)"
    )


def candidates(attempt: Attempt) -> int:
    """Among how many images the original was looked for; 0 where that is not known."""
    return int("".join(filter(str.isdigit, attempt.candidates)) or 0)
