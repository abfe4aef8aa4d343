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
    size = _candidates_of(ranked)
    return None if size is None else int(binom.isf(SURE, len(ranked), 1 / size))


def _candidates_of(found: Sequence[Attempt]) -> float | None:
    """Among how many images originals were looked for (median); ``None`` where none was."""
    pools = [candidates(attempt) for attempt in found if attempt.rank is not None]
    return median([pool for pool in pools if pool > 1])


def condition_told(found: Sequence[Attempt]) -> str:
    """Which identifications a run may have, as a condition to train on."""
    most = by_chance(found)
    tried = count(sum(attempt.rank is not None for attempt in found), "attempt")
    often = "No more attempts identify their original than by chance"
    if most is not None:
        often = f"With {tried}, as here, at most {most} may identify the original"
    return f"{often}; chance alone gives more in {100 * SURE:g} % of runs or fewer."


def identifying_told(found: Sequence[Attempt]) -> str:
    """What identifying means, in small print."""
    others = int(_candidates_of(found) or 0) - 1
    among = f"{others} other images" if others > 0 else "other images"
    return (
        f"An attempt identifies its original if its result is more like it than like any of "
        f"{among}. How many originals the identification misses is not known."
    )


def candidates(attempt: Attempt) -> int:
    """Among how many images the original was looked for; 0 where that is not known."""
    return int("".join(filter(str.isdigit, attempt.candidates)) or 0)
