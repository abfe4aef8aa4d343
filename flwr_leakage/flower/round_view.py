"""Read one phase of a round, training or evaluation, as the server sees it: asked clients and
replies.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from flwr.app import ArrayRecord, ConfigRecord, Message

from flwr_leakage.audit import ClientNote, ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.flower.arrays import (
    Expected,
    MalformedArraysError,
    NotFiniteError,
    check_like,
    diverged,
)
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.part import Part, Variates, change_made, observation_of
from flwr_leakage.flower.replies import (
    MAX_REASON,
    Layout,
    Needs,
    Sent,
    check_metrics,
    count_examples,
    layout,
    tell_layout,
    usual_layout,
)
from flwr_leakage.flower.wire import RECORD_KEY, records_of, unpack_note
from flwr_leakage.params import Params
from flwr_leakage.records import Observation, Update
from flwr_leakage.tracking.text import plain_text


@dataclass(frozen=True)
class Seen:
    """The facts that a server observes in a round of training.

    Attributes:
        observations: pairs of a reply's index and the observation of its update, for each update
            that can be read.
        notes: the notes that clients put beside their updates, with the client ids that the server
            believes.
        faults: for each reply that would harm an aggregation, by its index, the reason.
        unknown: the clients whose claimed client id is not certain, so that an evaluator cannot
            know their samples.
    """

    observations: Sequence[tuple[int, Observation]]
    notes: list[ClientNote]
    faults: dict[int, str]
    unknown: set[int]


@dataclass
class RoundView:
    """A reader of the replies in one training or evaluation phase of a round.

    Attributes:
        audit: the audit that records errors.
        names: the table of client ids by node id, to which the clients' notes are added.
        server_round: the number of the round, from 1.
        sent: the messages that were sent, by node.
        needs: the metrics that the strategy needs in every reply.
        drop: whether bad replies are left out of the aggregation. If so, arrays with other names
            than were sent make a reply bad.
        usual: the most common names of records and metrics in earlier replies, ``None`` for none.
        expected: the names, shapes and types that a reply's arrays must have.
        variates: the control variates of SCAFFOLD's clients, from this round and those before.
    """

    audit: ServerAudit
    names: ClientNames
    server_round: int
    sent: Sent
    needs: Needs
    drop: bool
    usual: Layout | None
    expected: Expected
    variates: Variates = field(default_factory=Variates)
    _states: dict[int, tuple[Params, Params, tuple[str, ...]]] = field(default_factory=dict)

    def look(self, replies: Sequence[Message]) -> Seen:
        """Return the observations, notes and faults of a round's replies to a training.

        Errors, missing replies and faults are recorded on the way.
        """
        self._record_errors_and_silence(replies, "")
        told = self._read_notes(replies)
        self._tell_of_another_model()
        observations = []

        def check(place: int, reply: Message) -> Layout:
            note = told.get(reply.metadata.src_node_id)
            observation, narrow = self._observe(reply, note.training if note else None)
            if observation is not None:
                observations.append((place, observation))
            self._check_precision(reply, narrow)
            check_metrics(reply, self.needs)
            return layout(reply, self._names_to(reply))

        faults = self._faults(replies, "", check)
        nodes = {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
        unknown = {node for node in nodes if node in told and node not in self.names.known}
        notes = [replace(note, client_id=self.names.of(node)) for node, note in told.items()]
        return Seen(observations, notes, faults, unknown)

    def look_at_evaluation(self, replies: Sequence[Message]) -> dict[int, str]:
        """Return the faults of a round's replies to an evaluation, by the reply's index.

        Errors, missing replies and faults are recorded on the way.
        """
        self._record_errors_and_silence(replies, "evaluation: ")

        def check(place: int, reply: Message) -> Layout:
            count_examples(reply, self.needs.weight)
            check_metrics(reply, self.needs, is_train=False)
            return layout(reply)

        return self._faults(replies, "evaluation: ", check)

    def _faults(
        self, replies: Sequence[Message], phase: str, check: Callable[[int, Message], Layout]
    ) -> dict[int, str]:
        """Return the bad replies, by their index, with the reason in words, and record a warning
        for each.

        ``check`` takes the index of a reply and the reply. It raises an error if the reply is bad,
        and else returns its layout, the names of its records and metrics. Warnings begin with
        ``phase``.
        """
        faults = self.sent.unasked(replies)
        layouts = {}
        for place, reply in enumerate(replies):
            # Replies with errors are skipped, as strategies do not aggregate them.
            if reply.has_error() or place in faults:
                continue
            try:
                layouts[place] = check(place, reply)
            # A client's reply may hold anything, so that any error may occur.
            except Exception as error:
                faults[place] = str(error) or type(error).__name__
        faults |= self._unusual(layouts)
        fate = "was left out of the aggregation" if self.drop else "is bad, and was handed on"
        for place, reason in faults.items():
            node = replies[place].metadata.src_node_id
            self._warn(node, f"{phase}the reply of {{}} {fate}: {reason}")
        return faults

    def _record_errors_and_silence(self, replies: Sequence[Message], phase: str) -> None:
        for reply in replies:
            if reply.has_error():
                reason = plain_text(reply.error.reason or "", MAX_REASON)
                self._warn(
                    reply.metadata.src_node_id, f"{phase}{{}} answered with an error: {reason}"
                )
        for node in self.sent.silent(replies):
            self._warn(node, f"{phase}{{}} never replied")

    def _read_notes(self, replies: Sequence[Message]) -> dict[int, ClientNote]:
        """Return the readable notes beside the updates, by node id, and learn the client ids that
        they claim.
        """
        notes: dict[int, ClientNote] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            record = None if reply.has_error() else reply.content.get(RECORD_KEY)
            if not isinstance(record, ConfigRecord):
                continue
            try:
                notes.setdefault(node, unpack_note(record))
            except Exception as error:
                self._warn(node, f"the note of {{}} is not used: {error}", self.audit.warn_once)
        disputed = self.names.learn({node: note.client_id for node, note in notes.items()})
        for node, reason in disputed.items():
            message = f"the name of node {node} is not certain: {reason}"
            self._warn(node, message, self.audit.warn_once)
        for node in self.names.mentioned & self.names.known:
            self.names.mentioned.discard(node)
            client = self.names.of(node)
            message = f"node {node}, of which events before tell, is client {client}"
            self.audit.inform(self.server_round, client, message)
        return notes

    def _observe(
        self, reply: Message, told: TrainingFacts | None
    ) -> tuple[Observation | None, tuple[str, ...]]:
        records = list(records_of(reply.content, ArrayRecord).values())
        if len(records) != 1:
            raise ValueError(f"expected one ArrayRecord, got {len(records)}.")
        count = count_examples(reply, self.needs.weight)
        node = reply.metadata.src_node_id
        if self._misfit:
            return None, check_like(records[0], self.sent.arrays(node))
        try:
            params, buffers, _ = self._state_sent_to(node)
        # The arrays are those that the server sent, so that no client is to blame.
        except NotFiniteError as error:
            self.audit.warn_once(self.server_round, -1, diverged(error))
            return None, ()
        client = self.names.of(node)
        schedule = self.audit.schedule.for_client(count)
        whole = self._part is None and (self.drop or set(records[0]) == self._names_to(reply))
        if not self.audit.wants(self.server_round, client):
            narrow = self.expected.check(records[0]) if whole else self._read_part(reply)[2]
            self.audit.spare(self.server_round, client, count)
            return None, narrow
        read = self.expected.read if whole else lambda _: self._read_part(reply)
        local_params, local_buffers, narrow = read(records[0])
        delta = change_made(told, local_params, params)
        if self._part is not None:
            held = self._part.variates(self.sent.arrays(node), self.audit.gradient_map)
            delta = self.variates.without(client, told, delta, held)
        made, where = Update(delta, local_buffers, schedule, count), (self.server_round, client)
        return observation_of(self.audit, where, (params, buffers), made), narrow

    def _names_to(self, reply: Message) -> set[str]:
        """Return the names of the arrays that the node behind a reply was sent."""
        return set(self.sent.arrays(reply.metadata.src_node_id))

    def _read_part(self, reply: Message) -> tuple[Params, Params, tuple[str, ...]]:
        """Return the parameters, the buffers and the names of less precise arrays in a reply.

        The method serves for a reply that holds a part of the model, or further arrays. An array is
        less precise if its numbers have fewer bits than the model's.

        Raises:
            MalformedArraysError: the reply has none of the arrays that were sent; or, if bad
                replies are left out, its arrays have not exactly the names that were sent.
        """
        (arrays,) = records_of(reply.content, ArrayRecord).values()
        sent = self._names_to(reply)
        if (self.drop and set(arrays) != sent) or not sent & set(arrays):
            raise MalformedArraysError("its arrays have other names than those that were sent.")
        part = Part.of({n: tuple(a.shape) for n, a in arrays.items()}, self.audit.gradient_map)
        if part.sentence():
            self.audit.inform_once(self.server_round, -1, f"{part.sentence()}.")
        node = reply.metadata.src_node_id
        change = part.variates(arrays, self.audit.gradient_map)
        self.variates.hear(self.names.of(node), change, self._state_sent_to(node)[0])
        return part.read(arrays, self.audit.gradient_map)

    def _check_precision(self, reply: Message, narrow: tuple[str, ...]) -> None:
        """Check that the arrays named ``narrow``, which a reply has with less precision than the
        model's, were sent to the client with less precision, too.

        Less precise arrays have fewer bits than the model's, or whole numbers in the place of
        floating-point ones.

        Raises:
            ValueError: the node received some of them with the model's precision. The message names
                the first ones.
        """
        if not narrow:
            return
        if not self._misfit:
            sent = self._state_sent_to(reply.metadata.src_node_id)[2]
            narrow = tuple(name for name in narrow if name not in sent)
        if narrow:
            raise ValueError(
                f"its arrays {', '.join(narrow[:3])} are less precise than the model's, and the "
                f"first reply's precision becomes the global model's."
            )

    @cached_property
    def _misfit(self) -> str:
        """Return a text on why the arrays that the server sends are not the model's; empty if they
        are.
        """
        shapes = self.sent.shapes()
        reason = self.expected.misfit(list(shapes)) if shapes else ""
        if reason:
            with suppress(MalformedArraysError):
                Part.of(shapes, self.audit.gradient_map)
                return ""
        return reason

    @cached_property
    def _part(self) -> Part | None:
        """Return the match of the sent arrays with the model; ``None`` if they are its whole
        ``state_dict``.

        The result is also ``None`` if nothing was sent, or if no sent array matches.
        """
        shapes = self.sent.shapes()
        if self._misfit or not shapes or not self.expected.misfit(list(shapes)):
            return None
        return Part.of(shapes, self.audit.gradient_map)

    def _tell_of_another_model(self) -> None:
        if self._misfit:
            self.audit.warn_once(
                self.server_round, -1,
                f"nothing is observed: what the strategy sends is not the model that observe was "
                f"given ({self._misfit}) Give it the model whose state_dict is sent, such as the "
                f"part that is trained.",
            )  # fmt: skip
        elif self._part is not None and self._part.sentence():
            self.audit.inform_once(self.server_round, -1, f"{self._part.sentence()}.")

    def _state_sent_to(self, node: int) -> tuple[Params, Params, tuple[str, ...]]:
        """Return the parameters and buffers sent to a node, and the names of less precise arrays.

        Less precise arrays have fewer bits than the model's. Entries that were not sent have the
        values of the audit's model. A record that is sent to several nodes is read only once.
        """
        arrays = self.sent.arrays(node)
        if id(arrays) not in self._states:
            if self._part is None:
                self._states[id(arrays)] = self.expected.read(arrays)
            else:
                gradient_map = self.audit.gradient_map
                params, buffers, narrow = self._part.read(arrays, gradient_map)
                whole = {**gradient_map.params, **params}, {**gradient_map.buffers, **buffers}
                self._states[id(arrays)] = *whole, narrow
        return self._states[id(arrays)]

    def _unusual(self, layouts: Mapping[int, Layout]) -> dict[int, str]:
        """Return the replies whose layout differs from that of most replies, by their index, with
        the reason.

        A layout is the names of records and metrics. Flower does not aggregate replies of different
        layouts. ``layouts`` are the replies' layouts by index.
        """
        if not layouts:
            return {}
        self.usual = usual = usual_layout(list(layouts.values()), self.usual)
        return {
            place: tell_layout(found, usual) for place, found in layouts.items() if found != usual
        }

    def _warn(
        self, node: int, message: str, warn: Callable[[int, int, str], None] | None = None
    ) -> None:
        """Record a warning about a node.

        ``{}`` in the message is replaced by words for the node. ``warn`` is the audit's method that
        records the warning: by default ``audit.warn``; ``audit.warn_once`` for a warning that may
        recur in each round.
        """
        if node not in self.names.known:
            self.names.mentioned.add(node)
        told = message.replace("{}", self.names.told(node), 1)
        (warn or self.audit.warn)(self.server_round, self.names.of(node), told)
