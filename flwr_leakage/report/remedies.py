"""What each defense that this run measured would have changed, and at what price."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.attempts import (
    Attempt,
    all_exact,
    attempts,
    grouped_by_client,
    most_at_risk_first,
    tally,
    what_if_names,
)
from flwr_leakage.report.grades import Grade
from flwr_leakage.report.header import describe
from flwr_leakage.report.index import (
    MAX_ROWS,
    Index,
    Table,
    ceiling_told,
    count,
    decibel,
    median,
    share,
    values,
)
from flwr_leakage.report.words import graded

BLAND = (
    "A defense can raise the PSNR of images that are not recovered at all: about the blind guess "
    "(what the server could guess without the update) and below it, PSNR tells how bland a failed "
    "picture is, not how much of the original it shows."
)
"""Why a defended update may have more decibels."""


@dataclass(frozen=True)
class Remedy:
    """One defense under which the same updates were attacked in the same rounds.

    Attributes:
        name: of the what-if.
        defense: what it is, with its settings.
        sentence: what it would have changed, and at what price.
        under: every attempt under it.
        before: the attempts on the same images in the same rounds without it.
        ended: of each attacked (round, client) whether the time limit ended the attack under the
            defense; empty where that was not recorded.
    """

    name: str
    defense: str
    sentence: str
    under: tuple[Attempt, ...]
    before: tuple[Attempt, ...]
    ended: Mapping[tuple[int, int], bool]


def remedies(index: Index, metadata: Mapping[str, Any]) -> list[Remedy]:
    """Every what-if of the run."""
    config = metadata.get("config")
    nodes = config.get("what_if") if isinstance(config, Mapping) else None
    nodes = nodes if isinstance(nodes, Mapping) else {}
    raw = {attempt.key: attempt for attempt in attempts(index)}
    return [_remedy(index, name, nodes.get(name), raw) for name in what_if_names(index)]


def _remedy(index: Index, name: str, node: Any, raw: Mapping[Any, Attempt]) -> Remedy:
    kind, settings = describe(node)
    defense = f"{name} ({', '.join(filter(None, (kind, settings)))})" if kind else name
    under = attempts(index, name)
    before = [raw[attempt.key] for attempt in under if attempt.key in raw]
    change = median(values(index.series("what_if", f"{name}/relative_change")))
    price = ""
    if change is not None:
        price = (
            f" It would have changed an update by {100 * change:.0f} % of its size "
            f"(Euclidean norm, median)."
        )
    stopped = index.series("what_if", f"{name}/stopped_by_budget")
    exact = all_exact(under)
    ended = {key[:2]: bool(r.value) and key[:2] not in exact for key, r in stopped.items()}
    sentence = (
        f"On the same {count(len(under), 'attempt')}, {_told(before)} would have become "
        f"{_told(under)}.{price}{told_of_time(ended)}"
    )
    return Remedy(name, defense, sentence, tuple(under), tuple(before), ended)


def told_of_time(ended: Mapping[tuple[int, int], bool]) -> str:
    """How many attacks on defended updates their time limit ended, in a sentence."""
    stopped = sum(ended.values())
    if not ended:
        return " Whether a time limit ended attacks under it was not recorded."
    if not stopped:
        return " No time limit ended an attack under it."
    return (
        f" The time limit ended the attack on {stopped} of {count(len(ended), 'defended update')}: "
        f"with more time more may show."
    )


def _told(found: Sequence[Attempt]) -> str:
    grades: Counter[Grade] = tally(found)
    middle = median([a.psnr for a in found if a.psnr is not None])
    return f"{graded(grades) or 'no result'} (median PSNR {decibel(middle)} dB)"


def remedies_table(asked: Sequence[Remedy]) -> Table:
    """By client, most at risk first: the grades as it was sent, and under each defense."""
    by_client = grouped_by_client(a for remedy in asked for a in remedy.before)
    rows = []
    for client in most_at_risk_first(by_client):
        name = str(client) if client >= 0 else "aggregate"
        for number, remedy in enumerate(asked):
            before = [a for a in remedy.before if a.key[1] == client]
            under = [a for a in remedy.under if a.key[1] == client]
            if number == 0:
                rows.append((name, "as it was sent", *_cells(before)))
            if under:
                rows.append((name, f"under {remedy.name}", *_cells(under)))
    columns = ("client", "its updates", "attempts", "grades of attempts", "median PSNR, dB",
               "highest PSNR, dB", "attempts that identify")  # fmt: skip
    texts = ("its updates", "grades of attempts")
    return Table(columns, tuple(rows), (*ceiling_told(rows), BLAND), MAX_ROWS, texts)


def _cells(found: Sequence[Attempt]) -> tuple[str, ...]:
    known = [attempt.psnr for attempt in found if attempt.psnr is not None]
    ranked = [attempt for attempt in found if attempt.rank is not None]
    first = sum(attempt.rank == 1 for attempt in ranked)
    return (str(len(found)), graded(tally(found)) or "–", decibel(median(known)),
            decibel(max(known, default=None)), share(first, len(ranked)))  # fmt: skip
