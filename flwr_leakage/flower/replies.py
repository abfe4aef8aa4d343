"""Find faults of a round's replies that would harm an aggregation.

The functions change no reply. Their caller decides whether a faulty reply is aggregated.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.differential_privacy import KEY_NORM_BIT

from flwr_leakage.flower.wire import records_of

MAX_EXAMPLES = 2**53
"""The largest number of samples that a client may report. Floats represent all integers up to this
one exactly."""

Layout = tuple[tuple[str, ...], tuple[tuple[str, tuple[tuple[str, int], ...]], ...]]
"""The layout of a reply: the names of its array records; and for each metric record, its name and
pairs of a metric's name and length, with −1 as the length of a single number."""


MAX_REASON = 500
"""The largest number of characters of a client's own text, such as an error, that a record
quotes."""


def unwrapped(strategy: Any) -> Iterator[Any]:
    """Yield the strategy, and the strategies that it wraps, from the outermost to the innermost."""
    while strategy is not None:
        yield strategy
        strategy = getattr(strategy, "strategy", None)


@dataclass(frozen=True)
class Needs:
    """The metrics that a strategy needs in every reply.

    Attributes:
        weight: the name of the metric with the number of samples, by which replies are weighted.
        numbers: the names of further metrics, each a number ≥ 0, that the strategy reads.
        one_record: whether a reply must hold exactly one ``MetricRecord``, as Flower's strategies
            demand.
    """

    weight: str = "num-examples"
    numbers: tuple[str, ...] = ()
    one_record: bool = False

    @staticmethod
    def of(strategy: Strategy, weight: str | None = None) -> "Needs":
        """Return the metrics that a strategy and the strategies it wraps need in a reply.

        ``weight`` is the metric with the number of samples, by default the strategy's.
        """
        found, numbers, checks = None, [], False
        for inner in unwrapped(strategy):
            key = getattr(inner, "weighted_by_key", None)
            found = key if found is None and isinstance(key, str) else found
            # Flower's own strategies derive from FedAvg, and demand exactly one ``MetricRecord``.
            checks = checks or isinstance(inner, FedAvg)
            if isinstance(key := getattr(inner, "train_loss_key", None), str):
                numbers.append(key)
            if isinstance(inner, DifferentialPrivacyClientSideAdaptiveClipping):
                numbers.append(KEY_NORM_BIT)
        return Needs(weight or found or "num-examples", tuple(numbers), checks)


def count_examples(reply: Message, weighted_by_key: str) -> int:
    """Return the number of samples that a reply claims in the metric ``weighted_by_key``.

    Raises:
        ValueError: the metric is missing, or is no number in [1, 2⁵³]. With larger numbers, sums
            and the average of the models might overflow.
    """
    for metrics in records_of(reply.content, MetricRecord).values():
        count = metrics.get(weighted_by_key)
        if count is None:
            continue
        if not isinstance(count, int | float) or not math.isfinite(count) or count < 1:
            raise ValueError(f"{weighted_by_key!r} must be at least 1, got {str(count)[:100]}.")
        if count > MAX_EXAMPLES:
            raise ValueError(f"{weighted_by_key!r} must be at most 2^53, got {count:.3g}.")
        return int(count)
    raise ValueError(f"expected the metric {weighted_by_key!r}, got none.")


def check_metrics(reply: Message, needs: Needs, *, is_train: bool = True) -> None:
    """Check that a strategy can aggregate a reply's metrics, as far as this reply alone shows.

    Of the reply to an evaluation (``is_train`` false), only the number of metric records is
    checked.

    Raises:
        ValueError: the reply has too many metric records, lacks a number that the strategy needs,
            or has metrics that are not finite or beyond 10¹⁰⁰. The message names the first fault.
    """
    records = records_of(reply.content, MetricRecord)
    if needs.one_record and len(records) != 1:
        raise ValueError(f"expected one MetricRecord, got {len(records)}.")
    if not is_train:
        return
    for name in needs.numbers:
        number = next((record[name] for record in records.values() if name in record), None)
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ValueError(
                f"the strategy needs the metric {name!r} as a number ≥ 0, got {str(number)[:100]}."
            )
    for metrics in records_of(reply.content, MetricRecord).values():
        for name, value in metrics.items():
            for number in value if isinstance(value, list) else [value]:
                if not math.isfinite(number) or abs(number) > 1e100:
                    raise ValueError(f"the metric {name[:100]!r} must be finite, got {number:.3g}.")


def layout(reply: Message, sent: Collection[str] | None = None) -> Layout:
    """Return the names of a reply's records and metrics, with the lengths of lists.

    All replies of a round must have the same layout, as Flower otherwise aggregates none of them.
    The names of the reply's arrays are a part of it if they differ from the names in ``sent``, the
    arrays that the server sent; ``None`` leaves them out.
    """
    metrics = [
        (key, tuple(sorted((name, _length(value)) for name, value in record.items())))
        for key, record in records_of(reply.content, MetricRecord).items()
    ]
    arrays = tuple(
        key if sent is None or set(record) == set(sent) else f"{key}: {', '.join(sorted(record))}"
        for key, record in records_of(reply.content, ArrayRecord).items()
    )
    return arrays, tuple(sorted(metrics))


def usual_layout(layouts: Sequence[Layout], before: Layout | None) -> Layout:
    """Return the most common of at least one layout of replies: names of records and metrics.

    If several are equally common, the layout of earlier rounds (``before``) is preferred, then one
    with the fewest metrics.
    """
    counts = Counter(layouts)

    def rank(entry: Layout) -> tuple[int, bool, int]:
        return counts[entry], entry == before, -sum(len(names) for _, names in entry[1])

    return max(counts, key=rank)


def tell_layout(found: Layout, usual: Layout) -> str:
    """Return a text on how a reply's names of records and metrics, ``found``, differ from the
    ``usual`` ones.
    """
    return f"its records are {_named(found)}, most clients' are {_named(usual)}"


def _named(entry: Layout) -> str:
    arrays, metrics = entry
    records = [f"{key!r} of {[_entry(*pair) for pair in names]}" for key, names in metrics]
    return f"arrays {list(arrays)} with metrics {', '.join(records) or 'none'}"[:400]


def _entry(name: str, length: int) -> str:
    return name if length < 0 else f"{name} (a list of {length})"


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else -1


class Sent:
    """The messages that the server sent in one training or evaluation phase of a round, by node
    id.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._arrays: dict[int, list[list[ArrayRecord]]] = {}
        for message in messages:
            records = list(records_of(message.content, ArrayRecord).values())
            self._arrays.setdefault(message.metadata.dst_node_id, []).append(records)

    def arrays(self, node: int) -> ArrayRecord:
        """Return the only ``ArrayRecord`` that a node was sent.

        Raises:
            ValueError: the node was sent no record, or several.
        """
        records = [record for records in self._arrays.get(node, []) for record in records]
        if len(records) != 1:
            raise ValueError(f"expected that one ArrayRecord was sent, got {len(records)}.")
        return records[0]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays that the first node was sent, by name; empty if none was
        sent.
        """
        for records in self._arrays.values():
            return {name: tuple(a.shape) for record in records[0] for name, a in record.items()}
        return {}

    def silent(self, replies: Sequence[Message]) -> list[int]:
        """Return the ids of the nodes that were sent a message and did not reply, sorted."""
        answered = {reply.metadata.src_node_id for reply in replies}
        return sorted(node for node in self._arrays if node not in answered)

    def unasked(self, replies: Sequence[Message]) -> dict[int, str]:
        """Return the replies that answer no sent message, by their index, with the reason in words.

        Such a reply is a node's second one, or comes from a node that was sent nothing. Replies
        with errors are not considered.
        """
        seen: Counter[int] = Counter()
        found = {}
        for place, reply in enumerate(replies):
            node = reply.metadata.src_node_id
            if reply.has_error():
                continue
            seen[node] += 1
            if node not in self._arrays:
                found[place] = "nothing was sent to this node in this round"
            elif seen[node] > len(self._arrays[node]):
                found[place] = f"it is the node's answer number {seen[node]} in this round"
        return found
