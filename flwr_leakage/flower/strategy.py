"""The server's side: an honest-but-curious strategy around any Flower strategy.

It runs the wrapped strategy's protocol unchanged, and keeps what passes by. Replies that would
break or poison an aggregation (other shapes, entries that are not finite, no samples) are left
out of it and recorded, so that one bad client does not end a run.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_leakage.audit import ClientNote, ServerAudit
from flwr_leakage.flower.arrays import read_arrays
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.params import Params, subtract
from flwr_leakage.records import Observation, Update


class HonestButCurious(Strategy):
    """Wrap any Flower strategy; observe each client's update, then hand it to an audit.

    Use it outermost, around server-side differential privacy too: those strategies clip the
    replies in place, and a curious server reads them before.

    Args:
        strategy: the strategy that trains.
        audit: what is done with the observations.
        weighted_by_key: the metric that holds the number of samples, as in the strategy.
    """

    def __init__(
        self, strategy: Strategy, audit: ServerAudit, weighted_by_key: str = "num-examples"
    ) -> None:
        self.strategy = strategy
        self.audit = audit
        self.weighted_by_key = weighted_by_key
        self._sent: dict[int, ArrayRecord] = {}
        self._states: dict[int, tuple[Params, Params]] = {}
        self._client_of: dict[int, int] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, and remember what was sent to whom."""
        self.audit.begin_round(server_round)
        with _sampling(f"{self.audit.seed}-{server_round}"):
            messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._sent = {
            message.metadata.dst_node_id: next(iter(message.content.array_records.values()))
            for message in messages
        }
        self._states = {}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Observe the replies, delegate the sound ones, then let the audit attack."""
        observed: list[tuple[Observation, Message]] = []
        notes: dict[int, ClientNote] = {}
        failed: list[Message] = []
        received = list(replies)
        for reply in received:
            node_id = reply.metadata.src_node_id
            if reply.has_error():
                self.audit.warn(
                    server_round,
                    self._client_of.get(node_id, -1),
                    f"node {node_id} answered with an error: {reply.error.reason}",
                )
                failed.append(reply)
                continue
            try:
                note = self._read_note(reply)
                observation = self._observe(server_round, reply)
            except ValueError as error:
                self._leave_out(server_round, reply, str(error))
                continue
            observed.append((observation, reply))
            if note is not None:
                notes[node_id] = note
        observed = self._of_one_layout(server_round, observed)
        silent = len(self._sent) - len(received)
        if silent > 0:
            self.audit.warn(server_round, -1, f"{silent} of {len(self._sent)} nodes never replied")
        # Replies arrive in any order, and floating-point sums depend on it.
        observed.sort(key=lambda pair: pair[0].client_id)
        result = self.strategy.aggregate_train(
            server_round, [reply for _, reply in observed] + failed
        )
        self.audit.inspect(
            server_round,
            [observation for observation, _ in observed],
            [notes[n] for _, reply in observed if (n := reply.metadata.src_node_id) in notes],
        )
        return result

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate."""
        with _sampling(f"{self.audit.seed}-{server_round}-evaluate"):
            return list(self.strategy.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate."""
        self.strategy.summary()

    def _read_note(self, reply: Message) -> ClientNote | None:
        """Read the mod's note, which names the client; without a note the node id stands for it."""
        node_id = reply.metadata.src_node_id
        record = reply.content.config_records.get(RECORD_KEY)
        if record is None:
            self._client_of.setdefault(node_id, node_id)
            return None
        note = unpack_note(record)
        known = self._client_of.get(node_id, note.client_id)
        if known != note.client_id:
            raise ValueError(f"node {node_id} is client {known} and says {note.client_id}.")
        for node, client in self._client_of.items():
            if client == note.client_id and node != node_id:
                raise ValueError(f"node {node_id} says it is client {client}, as node {node} did.")
        self._client_of[node_id] = note.client_id
        return note

    def _leave_out(self, server_round: int, reply: Message, reason: str) -> None:
        node_id = reply.metadata.src_node_id
        self.audit.warn(
            server_round,
            self._client_of.get(node_id, -1),
            f"the reply of node {node_id} was left out of the aggregation: {reason}",
        )

    def _of_one_layout(
        self, server_round: int, observed: list[tuple[Observation, Message]]
    ) -> list[tuple[Observation, Message]]:
        """Leave out replies with unusual record names: Flower would aggregate no reply at all."""
        layouts = Counter(_layout(reply) for _, reply in observed)
        if len(layouts) < 2:
            return observed
        (usual, _), *_ = layouts.most_common(1)
        for _, reply in observed:
            if _layout(reply) != usual:
                reason = f"its records are {_layout(reply)}, most clients' are {usual}."
                self._leave_out(server_round, reply, reason)
        return [pair for pair in observed if _layout(pair[1]) == usual]

    def _observe(self, server_round: int, reply: Message) -> Observation:
        node_id = reply.metadata.src_node_id
        sent = self._sent.get(node_id)
        if sent is None:
            raise ValueError("nothing was sent to this node in this round.")
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise ValueError(f"expected one ArrayRecord, got {len(records)}.")
        gradient_map = self.audit.gradient_map
        # Most strategies send one record to all: it is read once, and held once.
        if id(sent) not in self._states:
            self._states[id(sent)] = read_arrays(sent, gradient_map)
        params, buffers = self._states[id(sent)]
        local_params, local_buffers = read_arrays(records[0], gradient_map)
        num_examples = self._num_examples(reply)
        return Observation(
            server_round=server_round,
            client_id=self._client_of[node_id],
            params=params,
            buffers=buffers,
            update=Update(
                delta=subtract(local_params, params),
                buffers=local_buffers,
                schedule=self.audit.schedule.for_client(num_examples),
                num_examples=num_examples,
            ),
        )

    def _num_examples(self, reply: Message) -> int:
        for metrics in reply.content.metric_records.values():
            count = metrics.get(self.weighted_by_key)
            if count is None:
                continue
            if not isinstance(count, int | float) or not math.isfinite(count) or count < 1:
                raise ValueError(f"{self.weighted_by_key!r} must be at least 1, got {count}.")
            return int(count)
        raise ValueError(f"expected the metric {self.weighted_by_key!r}, got none.")


@contextmanager
def _sampling(seed: str) -> Iterator[None]:
    """Seed the process-wide generator, by which Flower's strategies sample clients, for a while."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _layout(reply: Message) -> tuple[str, ...]:
    """The names of a reply's arrays and metrics, with the lengths of metrics that are lists."""
    metrics = [
        f"{key}.{name}" + (f"[{len(value)}]" if isinstance(value, list) else "")
        for key, record in reply.content.metric_records.items()
        for name, value in record.items()
    ]
    return (*reply.content.array_records, *sorted(metrics))
