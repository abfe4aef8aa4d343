"""The client's side: a mod that scores and defends the update, and one line for the batches.

A mod sees messages only. What a defense of the inputs (MixUp, InstaHide) and the scores need,
the mini-batches, comes through ``encode``, one line in the training loop::

    @app.train(mods=[LeakageMod(audit)])
    def train(message: Message, context: Context) -> Message:
        ...
        for images, labels in loader:
            images, labels = encode(images, labels)
            loss = criterion(model(images), labels)
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from torch import Tensor

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.flower.arrays import read_arrays, write_arrays
from flwr_leakage.flower.wire import RECORD_KEY, pack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params, subtract
from flwr_leakage.per_sample import explain_update
from flwr_leakage.randomness import (
    Randomness,
    Reproducible,
    Secure,
    derive_seed,
    entropy_seed,
)
from flwr_leakage.records import Batch, Exposure, InputSpec, Measurement, Update
from flwr_leakage.schedules import Schedule
from flwr_leakage.scores import Account, score_round
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan

ACCOUNT_KEY = "flwr-leakage-account"
"""The record of the client's own state that says what its scores may still spend."""
EXPLAINED_KEY = "flwr-leakage-explained"
"""The record of it that says whether the scored model explains the client's updates."""


@dataclass(frozen=True)
class ClientAudit:
    """What a client does with its update before it is sent. The server decides none of it.

    Attributes:
        gradient_map: of the client's model and loss, in the mode it trains in.
        spec: shapes, classes and normalisation of the inputs.
        schedule: the local training, as far as the scores and defenses need it.
        defense: encodes batches and defends the update; the identity by default.
        scores: risk scores by name; none by default.
        seed: ``None``: the defense draws from the operating system's entropy, and nobody can
            repeat what it draws. A number: for simulations only; draws are a function of (seed,
            round, client), and whoever knows the seed subtracts the noise from the update. What
            is sent beside the update says which of the two it was.
        score_plan: when to score, which samples, at what cost, and what to keep and send.
        max_samples: samples kept for the scores and the defense, ≥ 1: whole mini-batches, from
            the first one on, until there are so many. DP-SGD needs all that a round uses.
        remark: what the client tells of its settings, beside each update; nothing by default.
        own_config: whether the client's samples and draws are its own, so that no server can
            re-derive them from a seed; it tells the server so.
        check_update: whether the scored model is held against the update that was made, by
            replaying the local training, which costs as much again. ``once``: in the first scored
            round that the client's state knows of; later rounds repeat what it found. Where the
            model does not explain the update, every score says so.
        num_threads: torch threads while training, scoring and defending; ``None`` leaves them.
    """

    gradient_map: GradientMap
    spec: InputSpec
    schedule: Schedule
    defense: Defense = field(default_factory=Defense)
    scores: Mapping[str, Score] = field(default_factory=dict)
    seed: int | None = None
    score_plan: ScorePlan = field(default_factory=ScorePlan)
    max_samples: int = 1024
    num_threads: int | None = None
    remark: str = ""
    own_config: bool = False
    check_update: Literal["once", "always", "never"] = "once"

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ValueError(f"max_samples must be at least 1, got {self.max_samples}.")
        if self.seed is not None and self.seed < 0:
            raise ValueError("seed must be None or ≥ 0, got a negative one.")
        if self.check_update not in ("once", "always", "never"):
            raise ValueError(
                f"check_update must be 'once', 'always' or 'never', got {self.check_update!r}."
            )

    @property
    def defends(self) -> bool:
        """Whether the defense changes samples or updates."""
        return self.defense.encodes_batches or (
            type(self.defense).on_update is not Defense.on_update
        )


class _Session:
    """One round of one client: the mini-batches that pass through ``encode``."""

    def __init__(self, audit: ClientAudit, server_round: int, client_id: int) -> None:
        self.audit = audit
        self.server_round = server_round
        self.client_id = client_id
        self.private: list[Batch] = []
        self.defended: list[Batch] = []
        self.kept = 0
        self._draws: dict[str, Randomness] = {}

    def seed(self, purpose: str) -> int:
        """A seed for draws that hide nothing."""
        if self.audit.seed is None:
            return entropy_seed()
        return derive_seed(
            self.audit.seed,
            server_round=self.server_round,
            client_id=self.client_id,
            purpose=purpose,
        )

    @property
    def device(self) -> torch.device:
        """Where the audit's model is, and so scores and defenses compute."""
        return next(iter(self.audit.gradient_map.params.values()), torch.zeros(())).device

    def randomness(self, purpose: str) -> Randomness:
        """Draws that hide data; outside of simulations nothing of the server's message enters."""
        if purpose not in self._draws:
            simulated = self.audit.seed is not None
            self._draws[purpose] = Reproducible(self._generator(purpose)) if simulated else Secure()
        return self._draws[purpose]

    def _generator(self, purpose: str) -> torch.Generator:
        """The generator of a simulation, in the state before its first draw."""
        return torch.Generator().manual_seed(self.seed(purpose))

    def has_reproducible_draws(self) -> bool:
        """Whether the defense drew anything that can be repeated."""
        return any(
            not torch.equal(drawn.generator.get_state(), self._generator(purpose).get_state())
            for purpose, drawn in self._draws.items()
            if isinstance(drawn, Reproducible)
        )

    def encode(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        here = self.device  # all but the training loop may be on another device than this batch
        private = Batch(inputs.to(here), targets.to(here))
        spec = self.audit.spec
        if inputs.shape[1:] != spec.shape:
            raise ValueError(
                f"inputs must have shape (B, {', '.join(map(str, spec.shape))}), "
                f"got {tuple(inputs.shape)}."
            )
        if targets.ndim == 1 and len(targets):
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= spec.num_classes:
                raise ValueError(
                    f"labels must lie in 0 … {spec.num_classes - 1}, got {low} … {high}."
                )
        defended = self.audit.defense.on_batch(private, spec.num_classes, self.randomness("encode"))
        room = self.audit.max_samples - self.kept
        if room > 0:
            size = self.audit.schedule.batch_size
            whole = slice(min(len(private), math.ceil(room / size) * size))
            self.private.append(Batch(private.inputs.detach(), private.targets.detach())[whole])
            self.defended.append(Batch(defended.inputs.detach(), defended.targets.detach())[whole])
            self.kept += whole.stop
        if defended is private:
            return inputs, targets
        return defended.inputs.to(inputs.device), defended.targets.to(targets.device)


_SESSION: ContextVar[_Session | None] = ContextVar("flwr_leakage_session", default=None)


def encode(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Let the client's defense encode a mini-batch, and the scores see it.

    Call it once for every mini-batch of the training loop; or for all samples before every
    epoch, which lets MixUp and InstaHide mix over all of them and is cheaper. Outside of a
    ``LeakageMod`` (a notebook, an evaluation) it returns its arguments unchanged.

    Args:
        inputs: (B, C, H, W) in the model's input space.
        targets: (B,) class indices.

    Returns:
        The inputs and targets to train on; targets are (B, K) probabilities after MixUp.
    """
    session = _SESSION.get()
    return (inputs, targets) if session is None else session.encode(inputs, targets)


class LeakageMod:
    """A Flower mod that scores and defends what a client is about to send.

    Put it on the train function, ``@app.train(mods=[LeakageMod(audit)])``, or on the whole app,
    innermost if there are others, so that Flower's own differential-privacy mods act on the
    defended update.

    Args:
        audit: the settings, or a function that makes them from the ``Context`` of a call
            (mods are built at import, before a run's config exists).
    """

    def __init__(self, audit: ClientAudit | Callable[[Context], ClientAudit]) -> None:
        self._audit = audit

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Run the training inside a session, then score and defend its reply.

        Messages that ask for no training, such as evaluations, pass untouched.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        audit = self._audit if isinstance(self._audit, ClientAudit) else self._audit(context)
        if len(message.content.array_records) != 1:
            return _refuse(message, "expected one ArrayRecord from the server")
        sent = next(iter(message.content.array_records.values()))
        try:
            session = _Session(audit, _server_round(message), _client_id(context))
        except ValueError as error:
            return _refuse(message, str(error))
        start = time.process_time()
        with _threads(audit.num_threads):
            token = _SESSION.set(session)
            try:
                reply = call_next(message, context)
            finally:
                _SESSION.reset(token)
            if reply.has_error():
                return reply
            train_seconds = time.process_time() - start
            try:
                return self._finish(message, reply, context, session, sent, train_seconds)
            except ValueError as error:
                return _refuse(message, str(error))

    def _finish(
        self,
        message: Message,
        reply: Message,
        context: Context,
        session: _Session,
        sent: ArrayRecord,
        train_seconds: float,
    ) -> Message:
        audit = session.audit
        if len(reply.content.array_records) != 1:
            raise ValueError(
                f"expected one ArrayRecord in the reply, got {len(reply.content.array_records)}"
            )
        key, returned = next(iter(reply.content.array_records.items()))
        if not (audit.scores or audit.defends):
            return self._reply(reply, context, session, ClientNote(
                session.client_id, train_cpu_seconds=train_seconds, remark=audit.remark,
                own_config=audit.own_config,
            ))  # fmt: skip
        params, buffers = read_arrays(sent, audit.gradient_map)
        local_params, local_buffers = read_arrays(returned, audit.gradient_map)
        if not session.private and (audit.scores or audit.defense.encodes_batches):
            raise ValueError(
                "the training loop must pass each mini-batch through flwr_leakage.flower.encode, "
                "as the scores or the defense need it; it passed none"
            )
        num_examples = _num_examples(reply, session)
        raw = Update(
            delta=subtract(local_params, params),
            buffers=local_buffers,
            schedule=audit.schedule.for_client(num_examples),
            num_examples=num_examples,
        )
        released, exposure = _defend(session, params, buffers, raw)
        if released is not raw:
            reply.content[key] = write_arrays(
                sent,
                {name: params[name] + value for name, value in released.delta.items()},
                released.buffers,
            )
        explained = _explain(session, exposure, context) if exposure else _Explained()
        start = time.process_time()
        measurements = (
            _score(session, exposure, context, train_seconds, explained) if exposure else []
        )
        note = ClientNote(
            client_id=session.client_id,
            measurements=tuple(measurements),
            train_cpu_seconds=train_seconds,
            score_cpu_seconds=time.process_time() - start,
            reproducible=session.has_reproducible_draws(),
            remark=audit.remark,
            own_config=audit.own_config,
            explained=explained.sentence,
        )
        return self._reply(reply, context, session, note)

    @staticmethod
    def _reply(reply: Message, context: Context, session: _Session, note: ClientNote) -> Message:
        """Keep the note, and put it beside the update."""
        plan = session.audit.score_plan
        _remember(context, session.server_round, note, plan.keep_rounds)
        reply.content[RECORD_KEY] = pack_note(note, with_measurements=plan.send)
        return reply


def _defend(
    session: _Session, params: Params, buffers: Params, raw: Update
) -> tuple[Update, Exposure | None]:
    """Release the update; the exposure is known where mini-batches were seen."""
    defense, randomness = session.audit.defense, session.randomness("defense")
    if not session.private:
        return defense.on_update(raw, randomness, None), None
    # Later epochs repeat the samples of the first, and what no step uses leaves no trace.
    used = raw.schedule.num_samples_used(raw.num_examples)
    private = Batch.concatenate(session.private)[:used]
    defended = Batch.concatenate(session.defended)[:used]
    local_round = LocalRound(
        session.audit.gradient_map, params, buffers, private, defended, raw.num_examples
    )
    released = defense.on_update(raw, randomness, local_round)
    return released, Exposure(params, buffers, private, defended, raw, released)


@dataclass(frozen=True)
class _Explained:
    """Whether the scored model explains the update, as far as the client knows.

    Attributes:
        sentence: what was found, and in which round.
        fails: whether it does not.
    """

    sentence: str = ""
    fails: bool = False


def _explain(session: _Session, exposure: Exposure, context: Context) -> _Explained:
    """Compare the update with that of the scored model, or repeat what an earlier round found."""
    audit, states = session.audit, context.state.config_records
    scored = audit.scores and audit.score_plan.includes(session.server_round)
    if audit.check_update == "never" or not scored:
        return _Explained()
    if audit.check_update == "once" and EXPLAINED_KEY in states:
        kept = states[EXPLAINED_KEY]
        return _Explained(str(kept["sentence"]), bool(kept["fails"]))
    found = explain_update(audit.gradient_map, exposure)
    explained = _Explained(f"in round {session.server_round}, {found.sentence}", found.fails)
    context.state[EXPLAINED_KEY] = ConfigRecord(asdict(explained))
    return explained


def _score(
    session: _Session,
    exposure: Exposure,
    context: Context,
    train_seconds: float,
    explained: _Explained,
) -> list[Measurement]:
    audit, states = session.audit, context.state.config_records
    kept = cast(dict[str, float], dict(states.get(ACCOUNT_KEY, ConfigRecord())))
    measurements, account = score_round(
        audit.scores,
        audit.gradient_map,
        exposure,
        audit.score_plan,
        Account(**kept),
        server_round=session.server_round,
        train_seconds=train_seconds,
        seed=session.seed("score"),
        warnings=[explained.sentence] if explained.fails else [],
    )
    context.state[ACCOUNT_KEY] = ConfigRecord(asdict(account))
    return measurements


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refuse(message: Message, reason: str) -> Message:
    return Message(
        Error(ErrorCode.MOD_FAILED_PRECONDITION, f"flwr_leakage: {reason}"), reply_to=message
    )


def _server_round(message: Message) -> int:
    """The round that the server names; 0 where it names none."""
    for config in message.content.config_records.values():
        if "server-round" in config:
            value = config["server-round"]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"server-round must be an integer ≥ 0, got {value!r}")
            return value
    return 0


def _client_id(context: Context) -> int:
    return int(cast(int, context.node_config.get("partition-id", context.node_id)))


def _num_examples(reply: Message, session: _Session) -> int:
    for metrics in reply.content.metric_records.values():
        if "num-examples" in metrics:
            return int(cast(int, metrics["num-examples"]))
    if session.private:
        return sum(len(batch) for batch in session.private)
    raise ValueError("expected the metric 'num-examples' in the reply, got none")


def _remember(
    context: Context, server_round: int, note: ClientNote, keep_rounds: int | None
) -> None:
    """Keep the scores of the latest rounds in the client's own state."""
    history = context.state.config_records.get(RECORD_KEY, ConfigRecord())
    history[f"round-{server_round}"] = note.to_text()
    if keep_rounds is not None:
        for name in sorted(history, key=lambda name: int(name.removeprefix("round-"))):
            if len(history) > keep_rounds:
                del history[name]
    context.state[RECORD_KEY] = history
