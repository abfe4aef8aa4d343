"""Read clients' errors and the notes beside their updates, which a strategy of ``flwr.server`` is
not shown.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from flwr.app import ConfigRecord, Error, Message
from flwr.common import FitRes
from flwr.serverapp import Grid

from flwr_leakage.audit import ClientNote, ServerAudit
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.replies import MAX_REASON
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.tracking.text import plain_text


class Heard:
    """A listener that reads, from the messages of one round's training, clients' errors and the
    notes that they put beside their updates.

    A strategy of ``flwr.server`` gets only models, numbers and metrics. Its client proxies hold the
    grid, through which all messages pass. The listener wraps the grid's methods, reads the
    messages, and returns them unchanged.
    """

    def __init__(self, audit: ServerAudit, names: ClientNames) -> None:
        self.audit = audit
        self.names = names
        self._round = 0
        self._asked: Set[int] = frozenset()
        self._notes: dict[int, ConfigRecord] = {}
        self._errors: dict[int, Error] = {}
        self._grids: list[tuple[Grid, object]] = []

    def listen(self, server_round: int, proxies: Sequence[Any]) -> None:
        """Forget the messages of the previous round, and listen to the clients asked in this round.

        ``proxies`` are the client proxies that the strategy asks.
        """
        self.tell_of_lost_round()
        self._round, self._asked = server_round, {int(proxy.node_id) for proxy in proxies}
        self._notes, self._errors = {}, {}
        for proxy in proxies:
            grid = getattr(proxy, "grid", None)
            if grid is not None and all(grid is not known for known, _ in self._grids):
                self._grids.append((grid, vars(grid).get("send_and_receive")))
                grid.send_and_receive = self._through(grid.send_and_receive)

    def stop(self) -> None:
        """Stop listening, and restore the grids' own methods.

        A round that has begun is recorded as lost if its results were not shown to the strategy.
        """
        self.tell_of_lost_round()
        for grid, before in self._grids:
            vars(grid).pop("send_and_receive")
            if before is not None:
                vars(grid)["send_and_receive"] = before
        self._grids = []

    def notes(self) -> dict[int, ClientNote]:
        """Return the notes that clients put beside their updates, by node id.

        A warning is recorded for each note that cannot be read.
        """
        notes = {}
        for node, record in self._notes.items():
            try:
                notes[node] = unpack_note(record)
            except Exception as error:
                self._warn(node, f"the note of {{}} is not used: {error}", self.audit.warn_once)
        return notes

    def end_round(
        self, answered: Set[int], failures: Sequence[tuple[object, FitRes] | BaseException]
    ) -> None:
        """Record a warning, only once each, for clients that failed or never replied.

        ``answered`` are the node ids of the clients whose models the strategy is shown.
        ``failures`` are the errors that the strategy is shown. Under SecAgg+ an error may be among
        them twice.
        """
        self._tell_of_errors()
        for failure in failures:
            if isinstance(failure, BaseException) and self._is_told(failure):
                continue
            what = failure if isinstance(failure, BaseException) else failure[1].status.message
            self.audit.warn(
                self._round, -1, f"a client failed: {plain_text(str(what), MAX_REASON)}"
            )
        if self._grids:
            for node in sorted(self._asked - answered - self._errors.keys()):
                self._warn(node, "{} never replied")
        self._asked = frozenset()

    def tell_of_lost_round(self) -> None:
        """Record a warning if the round began, but the strategy was shown none of its results."""
        if not self._asked:
            return
        self._tell_of_errors()
        self._asked = frozenset()
        message = (
            "the strategy was shown nothing of this round: it ended early, as secure aggregation "
            "does where too few clients are left, or the server calls another method than "
            "aggregate_fit"
        )
        self.audit.warn(self._round, -1, message)

    def _tell_of_errors(self) -> None:
        for node, error in self._errors.items():
            reason = plain_text(error.reason or "", MAX_REASON)
            self._warn(node, f"{{}} answered with an error: {reason}")

    def _is_told(self, failure: BaseException) -> bool:
        """Return whether ``failure`` is an error that a node sent and that was already recorded for
        the node.
        """
        return any(
            any(argument is error for argument in failure.args)
            or (error.reason and error.reason in str(failure))
            for error in self._errors.values()
        )

    def _warn(
        self, node: int, message: str, warn: Callable[[int, int, str], None] | None = None
    ) -> None:
        told = message.replace("{}", self.names.told(node), 1)
        (warn or self.audit.warn)(self._round, self.names.of(node), told)

    def _through(self, send: Callable[..., Iterable[Message]]) -> Callable[..., list[Message]]:
        def send_and_receive(*args: Any, **kwargs: Any) -> list[Message]:
            replies = list(send(*args, **kwargs))
            for reply in replies:
                if reply.metadata.message_type.split(".")[0] == "train":
                    self._hear(reply)
            return replies

        return send_and_receive

    def _hear(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        if reply.has_error():
            self._errors[node] = reply.error
        elif isinstance(note := reply.content.get(RECORD_KEY), ConfigRecord):
            self._notes[node] = note
