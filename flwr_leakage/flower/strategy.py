"""Put an honest-but-curious observer around any Flower strategy on the server.

The wrapped strategy runs its own ``start`` and its own rounds. By default the observer changes
neither which clients the strategy samples, nor the replies that it gets and their order, nor its
errors, nor the process-wide random states. Errors of the audit are recorded, and never raised.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, ParamSpec, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_leakage.audit import ServerAudit
from flwr_leakage.flower.arrays import Expected
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.part import Variates
from flwr_leakage.flower.replies import Layout, Needs, Sent
from flwr_leakage.flower.round_view import RoundView, Seen
from flwr_leakage.flower.undisturbed import guarded, seeded_sampling, sigterm_unwinds
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.measurements import ENDED_EARLY

P = ParamSpec("P")
BadReplies = Literal["pass", "drop"]
PHASES = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


class HonestButCurious(Strategy):
    """A wrapper of any Flower strategy that hands each client's update to an audit.

    Make this the outermost wrapper, also around strategies for server-side differential privacy:
    they clip replies in place, and a curious server reads the replies before. All other attributes
    of the wrapper are those of the wrapped strategy.

    Args:
        strategy: the strategy that trains.
        audit: the audit that attacks the observed updates.
        weighted_by_key: the name of the metric that holds a reply's number of samples; by default
            the wrapped strategy's, or else ``num-examples``.
        bad_replies: ``pass`` hands every reply on to the strategy, as without the audit, and
            records its faults. ``drop`` records replies that would break or poison an aggregation,
            and leaves them out, however many they are, so that no bad client ends a run. A reply is
            left out if its arrays do not have the names and shapes of those that were sent, are not
            finite, or have fewer bits; if its number of samples is missing or absurd; if it has not
            exactly one record of metrics, or lacks a metric that the strategy reads; or if it is a
            node's second answer. A reply without such a fault is left out, too, if its metrics have
            other names than those of most clients, as no strategy averages both. If no reply is
            left, the strategy is handed nothing, and the run goes on with the present model.
        reproducible: whether clients are sampled by the audit's seed and the round, and replies are
            handed on in the order of the clients, so that the same seed gives the same
            floating-point sums; for simulations. The process-wide random states stay as they are in
            this case, too.
    """

    def __init__(
        self,
        strategy: Strategy,
        audit: ServerAudit,
        weighted_by_key: str | None = None,
        *,
        bad_replies: BadReplies = "pass",
        reproducible: bool = False,
    ) -> None:
        if bad_replies not in get_args(BadReplies):
            raise ValueError(
                f"bad_replies must be one of {get_args(BadReplies)}, got {bad_replies!r}."
            )
        self.strategy = strategy
        self.audit = audit
        self.needs = Needs.of(strategy, weighted_by_key)
        self.weighted_by_key = self.needs.weight
        self.bad_replies = bad_replies
        self.reproducible = reproducible
        self._names = ClientNames()
        self._variates = Variates()
        self._own: dict[str, Callable[..., Any]] = {}
        self._expected: tuple[GradientMap, Expected] | None = None
        self._training = self._evaluation = self._view(0, [], None)
        self._observed_rounds = 0

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped strategy's attribute of a name that this class lacks."""
        # ``copy`` looks up attributes before ``__init__`` has set ``strategy``. Without this error,
        # the lookup would call this method for ``strategy`` again and again.
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the wrapped strategy's own ``start``, observe its rounds, and return its result."""
        try:
            with sigterm_unwinds(), self._hooked():
                result: Result = self.strategy.start(*args, **kwargs)
        except BaseException as error:
            now, message = self._training.server_round, f"{type(error).__name__}: {error}"
            self._guarded(now, self.audit.error, now, f"{ENDED_EARLY}: {message}")
            raise
        if not self._observed_rounds:
            message = (
                f"nothing was observed: {type(self.strategy).__name__}.start never called "
                "configure_train and aggregate_train"
            )
            self._guarded(0, self.audit.error, 0, message)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return and remember the messages by which the wrapped strategy asks clients to train."""
        self._guarded(server_round, self.audit.begin_round, server_round)
        with self._sampling(f"{self.audit.seed}-{server_round}"):
            messages = list(self._inner("configure_train")(server_round, arrays, config, grid))
        self._training = self._view(server_round, messages, self._training.usual)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the wrapped strategy's aggregate of the replies, and attack their updates.

        The replies are read before the strategy aggregates them.
        """
        self._observed_rounds += 1
        received = list(replies)
        seen: Seen | None = self._guarded(server_round, self._training.look, received)
        handed_on = self._handed_on(received, seen.faults if seen else {})
        try:
            result: tuple[ArrayRecord | None, MetricRecord | None] = self._aggregate(
                "aggregate_train", server_round, received, handed_on, (None, None)
            )
        # The strategy's error ends the run, but the updates that were sent are still audited.
        except Exception:
            self._inspect(server_round, seen, len(handed_on))
            raise
        self._inspect(server_round, seen, len(handed_on))
        return result

    def _inspect(self, server_round: int, seen: Seen | None, num_updates: int) -> None:
        """Let the audit attack the updates of a round.

        ``seen`` holds the round's observations, or is ``None`` after an error; ``num_updates``
        counts the replies that were handed to the strategy.
        """
        if seen is None:
            return
        kept = [
            observation
            for place, observation in seen.observations
            if self.bad_replies == "pass" or place not in seen.faults
        ]
        observations = sorted(kept, key=lambda observation: observation.client_id)
        self._guarded(
            server_round, self.audit.inspect, server_round, observations, seen.notes,
            seen.unknown, num_updates,
        )  # fmt: skip

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return and remember the messages by which the wrapped strategy asks clients to
        evaluate.
        """
        with self._sampling(f"{self.audit.seed}-{server_round}-evaluate"):
            messages = list(self._inner("configure_evaluate")(server_round, arrays, config, grid))
        self._evaluation = self._view(server_round, messages, self._evaluation.usual)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the wrapped strategy's aggregate of evaluations, and record bad and missing
        replies.
        """
        received = list(replies)
        faults = self._guarded(server_round, self._evaluation.look_at_evaluation, received)
        handed_on = self._handed_on(received, faults or {})
        result: MetricRecord | None = self._aggregate(
            "aggregate_evaluate", server_round, received, handed_on, None
        )
        return result

    def summary(self) -> None:
        """Call the wrapped strategy's method of the same name."""
        self.strategy.summary()

    def _view(self, server_round: int, messages: list[Message], usual: Layout | None) -> RoundView:
        drop, gradient_map = self.bad_replies == "drop", self.audit.gradient_map
        if self._expected is None or self._expected[0] is not gradient_map:
            self._expected = gradient_map, Expected(gradient_map)
        return RoundView(
            self.audit, self._names, server_round, Sent(messages), self.needs, drop,
            usual, self._expected[1], self._variates,
        )  # fmt: skip

    def _handed_on(self, received: list[Message], faults: dict[int, str]) -> list[Message]:
        """Return the received replies that the wrapped strategy gets.

        The replies are in the order of arrival; if the run is reproducible, in that of client ids.
        If bad replies are dropped, those in ``faults`` (the reasons by a reply's index) are left
        out.
        """
        kept = received
        if self.bad_replies == "drop":
            kept = [reply for place, reply in enumerate(received) if place not in faults]
        if self.reproducible:
            # Floating-point sums depend on the order of replies, which arrive in any order.
            kept = sorted(kept, key=lambda reply: self._names.of(reply.metadata.src_node_id))
        return kept

    def _aggregate(
        self,
        name: str,
        server_round: int,
        received: list[Message],
        handed_on: list[Message],
        nothing: Any,
    ) -> Any:
        """Return the result of the wrapped strategy's method ``name`` on the replies ``handed_on``.

        If all ``received`` replies were left out and the method therefore fails, the result is
        ``nothing``.
        """
        try:
            return self._inner(name)(server_round, handed_on)
        except Exception as error:
            if handed_on or not received:
                raise
            reason = f"{type(error).__name__}: {error}"
            message = f"nothing was aggregated: all replies were left out ({reason})"
            self._guarded(server_round, self.audit.warn, server_round, -1, message)
            return nothing

    def _sampling(self, seed: str) -> AbstractContextManager[None]:
        return seeded_sampling(seed) if self.reproducible else nullcontext()

    def _inner(self, name: str) -> Callable[..., Any]:
        """Return the wrapped strategy's own method ``name``, even while this wrapper's method
        replaces it.
        """
        method: Callable[..., Any] = self._own.get(name) or getattr(self.strategy, name)
        return method

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Replace the wrapped strategy's methods by this wrapper's in a ``with`` block.

        Thereby the strategy's own ``start`` calls the wrapper's methods in every phase of a round.
        """
        covered = {
            name: vars(self.strategy)[name] for name in PHASES if name in vars(self.strategy)
        }
        self._own = {name: getattr(self.strategy, name) for name in PHASES}
        for name in PHASES:
            setattr(self.strategy, name, getattr(self, name))
        try:
            yield
        finally:
            self._own = {}
            for name in PHASES:
                delattr(self.strategy, name)
                if name in covered:
                    setattr(self.strategy, name, covered[name])

    def _guarded(self, server_round: int, action: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function of the audit; ``None`` after an error.

        The error is recorded, and not raised.
        """
        return guarded(self.audit, server_round, action, *args)
