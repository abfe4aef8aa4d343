"""Score and defend updates on a client, by a mod and one line in the training loop.

A mod sees only messages. A defense of the inputs (MixUp, InstaHide) and the scores need the
mini-batches, which the line with ``encode`` in the training loop gives them::

    @app.train(mods=[LeakageMod(audit)])
    def train(message: Message, context: Context) -> Message:
        ...
        for images, labels in loader:
            images, labels = encode(images, labels)
            loss = criterion(model(images), labels)
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.flower.arrays import read_arrays, write_arrays
from flwr_leakage.flower.client_audit import ClientAudit, check_limits
from flwr_leakage.flower.client_owner import (
    REFUSED,
    keep_own,
    refuse,
    remember,
    sent_note,
    withhold,
)
from flwr_leakage.flower.client_release import Trained, explain_by_replay, release
from flwr_leakage.flower.client_session import SESSION, Session, encode
from flwr_leakage.flower.wire import RECORD_KEY, pack_note, records_of, unseen
from flwr_leakage.params import subtract
from flwr_leakage.records import Update

__all__ = ["ClientAudit", "LeakageMod", "encode"]


BAD_ROUND = "server-round must be an integer ≥ 0"
"""The error that a client sends if a message names no valid round. The text reveals nothing of the
client."""


class LeakageMod:
    """A Flower mod that scores and defends an update before a client sends it.

    Put the mod on the train function, ``@app.train(mods=[LeakageMod(audit)])``, or on the whole
    app. Put it innermost if there are other mods, so that Flower's own differential-privacy mods
    act on the defended update.

    Args:
        audit: the settings, or a function that makes them from the ``Context`` of a call. Mods are
            made when the app is imported, before a run's config exists.
    """

    def __init__(self, audit: ClientAudit | Callable[[Context], ClientAudit]) -> None:
        self._audit = audit
        self._is_checked = isinstance(audit, ClientAudit)
        if isinstance(audit, ClientAudit):
            check_limits(audit.gate, audit.scores)

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Run a client's training, then score and defend the update in its reply.

        The result is the reply to send, or an error if the update must not be sent. ``call_next``
        is the next mod or the app itself. A message that asks for no training, such as an
        evaluation, goes to ``call_next`` unchanged, and so does its reply.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            reply = call_next(message, context)
            holds = isinstance(reply, Message) and not reply.has_error() and unseen(reply)
            if holds and (audit := self._settings(context)).withholds:
                return withhold(message, holds, audit.sharing)
            return reply
        audit = self._settings(context)
        # The settings are checked only once, as the check takes as long as scoring a sample.
        if not self._is_checked:
            try:
                check_limits(audit.gate, audit.scores)
            except ValueError as error:
                return withhold(message, error, audit.sharing)
            self._is_checked = True
        if len(message.content.array_records) != 1:
            return refuse(message, "expected one ArrayRecord from the server")
        sent = next(iter(message.content.array_records.values()))
        try:
            session = Session(audit, server_round_of(message), client_id_of(context), context)
        except ValueError as error:
            return refuse(message, str(error))
        start = time.process_time()
        with _threads(audit.num_threads):
            token = SESSION.set(session)
            try:
                reply = call_next(message, context)
            finally:
                SESSION.reset(token)
            if reply.has_error():
                return reply
            session.train_seconds = time.process_time() - start
            try:
                return self._finish(message, reply, session, sent)
            # Flower would send the error's text to the server. As this text may reveal facts about
            # samples, a fixed text replaces it.
            except Exception as error:
                return withhold(message, error, audit.sharing)

    def _settings(self, context: Context) -> ClientAudit:
        return self._audit if isinstance(self._audit, ClientAudit) else self._audit(context)

    def _finish(
        self, message: Message, reply: Message, session: Session, sent: ArrayRecord
    ) -> Message:
        audit = session.audit
        if len(reply.content.array_records) != 1:
            raise ValueError(
                f"expected one ArrayRecord in the reply, got {len(reply.content.array_records)}"
            )
        key, returned = next(iter(reply.content.array_records.items()))
        if audit.withholds and (problem := unseen(reply, released=key)):
            raise ValueError(problem)
        measures = audit.scores or audit.attack is not None or audit.gate is not None
        measures = measures or audit.always_checks(session.server_round)
        note = ClientNote(
            session.client_id,
            train_cpu_seconds=session.train_seconds,
            remark=audit.remark,
            own_config=audit.own_config,
        )
        # Without scores and a defense the arrays need not be read, and only the note is sent.
        if not (measures or audit.defends):
            remember(session.context, session.server_round, note, audit.score_plan.keep_rounds)
            told = audit.sharing.travelling(note, released_as_trained=True, remark=audit.remark)
            reply.content[RECORD_KEY] = pack_note(told)
            return reply
        params, buffers = read_arrays(sent, audit.gradient_map)
        local_params, local_buffers = read_arrays(returned, audit.gradient_map)
        if not session.private and (measures or audit.defense.encodes_batches):
            raise ValueError(
                "the training loop must pass each mini-batch through flwr_leakage.flower.encode, "
                "as the scores, the self-attack, the gate, the check of the update or the defense "
                "need it; it passed none"
            )
        num_examples = _num_examples(reply, session)
        raw = Update(
            delta=subtract(local_params, params),
            buffers=local_buffers,
            schedule=audit.schedule.for_client(num_examples),
            num_examples=num_examples,
        )
        trained = Trained(params, buffers, raw, raw)
        done = release(session, trained, partial(explain_by_replay, session))
        note = replace(
            note,
            score_cpu_seconds=done.seconds,
            replay_cpu_seconds=done.explained.seconds,
            reproducible=session.has_reproducible_draws(),
            replay=done.explained.replay,
            explained=done.explained.sentence,
        )
        keep_own(session, done, note)
        if done.refused:
            return refuse(message, REFUSED)
        released = done.update
        if released is not raw:
            reply.content[key] = write_arrays(
                sent,
                {name: params[name] + value for name, value in released.delta.items()},
                released.buffers,
            )
        reply.content[RECORD_KEY] = pack_note(sent_note(session, done, note, audit.remark))
        return reply


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def server_round_of(message: Message) -> int:
    """Return the number of the round that the server names in a message; 0 if it names none.

    Raises:
        ValueError: the server names something else than an integer ≥ 0.
    """
    for config in records_of(message.content, ConfigRecord).values():
        if "server-round" in config:
            value = config["server-round"]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(BAD_ROUND)
            return value
    return 0


def client_id_of(context: Context) -> int:
    return int(cast(int, context.node_config.get("partition-id", context.node_id)))


def _num_examples(reply: Message, session: Session) -> int:
    for metrics in records_of(reply.content, MetricRecord).values():
        if "num-examples" in metrics:
            return int(cast(int, metrics["num-examples"]))
    if session.private:
        return sum(len(batch) for batch in session.private)
    raise ValueError("expected the metric 'num-examples' in the reply, got none")
