"""What can be done and at what price: only what this run measured."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.attempts import Attempt, attempts, tally, what_if_names
from flwr_leakage.report.grades import Grade
from flwr_leakage.report.header import describe
from flwr_leakage.report.index import Index, by_round, count, decibel, median, values
from flwr_leakage.report.words import graded


@dataclass(frozen=True)
class Remedy:
    """One defense under which the same updates were attacked in the same rounds.

    Attributes:
        name: of the what-if.
        defense: what it is, with its settings.
        sentence: what it would have changed, and at what price.
        psnr: of each round, in dB, for the chart.
    """

    name: str
    defense: str
    sentence: str
    psnr: Mapping[int, list[float]]


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
        price = f"It would have changed an update by {100 * change:.0f} % of its length (median). "
    sentence = (
        f"On the same {count(len(under), 'attempt')}, {_told(before)} would have become "
        f"{_told(under)}. {price}What that costs in accuracy was not measured here: it takes a run "
        f"with that defense. The attack was the same as without the defense; one made for it may "
        f"reach more."
    )
    psnr = by_round(index.series("what_if", f"{name}/psnr"))
    return Remedy(name, defense, sentence, psnr)


def _told(found: list[Attempt]) -> str:
    grades: Counter[Grade] = tally(found)
    middle = median([a.psnr for a in found if a.psnr is not None])
    return f"{graded(grades) or 'no result'} (median {decibel(middle)} dB)"
