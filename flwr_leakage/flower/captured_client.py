"""Capture one training of a client, score and defend its update, and put a report beside it."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from torch import Tensor

from flwr_leakage.audit import ClientNote, ReplayResult, Truth
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.sharing import UNREAD, Shared, Sharing
from flwr_leakage.capture import Glance, Limits, capture
from flwr_leakage.capture.exposure import read_round
from flwr_leakage.capture.names import name_tensors
from flwr_leakage.capture.samples import private_samples
from flwr_leakage.capture.sent import PARAMETERS
from flwr_leakage.defenses.base import Defense
from flwr_leakage.flower.arrays import differing, write_arrays
from flwr_leakage.flower.client import client_id_of, server_round_of
from flwr_leakage.flower.client_audit import (
    ClientAudit,
    SelfAttacker,
    as_self_attack,
    check_limits,
    check_own,
)
from flwr_leakage.flower.client_owner import (
    REFUSED,
    keep_own,
    own_folder,
    refuse,
    remember,
    sent_note,
    withhold,
)
from flwr_leakage.flower.client_release import Explained, Release, Trained, release
from flwr_leakage.flower.client_replay import (
    Replayed,
    SeenRound,
    is_due,
    look,
    not_sent,
    replay_now,
)
from flwr_leakage.flower.client_session import Session
from flwr_leakage.flower.shared_truth import TruthFolder
from flwr_leakage.flower.wire import RECORD_KEY, pack_note, records_of, unseen
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.measurements import DEFENDED_BY, NOT_CHECKED
from flwr_leakage.params import Params, subtract
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, Update
from flwr_leakage.schedules import UntoldSchedule
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan

_LOG = logging.getLogger(__name__)
_NOTHING = Release(Update({}, {}, LocalSchedule(1.0), 0))
"""The ``Release`` of a training whose update is neither defended nor scored. Its update is empty
and is never sent."""


@dataclass(frozen=True)
class CapturePlan:
    """The settings by which a client scores, defends and reports each training.

    ``flwr_leakage.flower.audit`` has arguments of the same names, and explains them.
    """

    scores: Mapping[str, Score] = field(default_factory=dict)
    defense: Defense = field(default_factory=Defense)
    score_plan: ScorePlan = field(default_factory=ScorePlan)
    replay_every: int | None = 10
    replay_samples: int | None = 64
    limits: Limits = field(default_factory=Limits)
    spec: InputSpec | None = None
    seed: int | None = None
    truth: TruthFolder | None = None
    attack: SelfAttacker = None
    share: Shared = "nothing"
    gate: Gate | None = None
    folder: str | None = None
    sharing: Sharing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharing", Sharing.of(self.share))
        if self.replay_every is not None and self.replay_every < 1:
            raise ValueError(f"replay_every must be None or ≥ 1, got {self.replay_every}.")
        if self.replay_samples is not None and self.replay_samples < 1:
            raise ValueError(f"replay_samples must be None or ≥ 1, got {self.replay_samples}.")
        if self.attack is not None:
            object.__setattr__(self, "attack", as_self_attack(self.attack))
        check_own(self.gate, self.scores, cast(Any, self.attack))
        check_limits(self.gate, self.scores)
        if self.defense.encodes_batches:
            raise ValueError(
                f"{type(self.defense).__name__} changes the samples before training, which a "
                f"capture cannot: use LeakageMod with a ClientAudit, and encode() in the loop."
            )

    @property
    def withholds(self) -> bool:
        """Return whether an update must be withheld if it could not be defended or judged.

        It must if there is a defense, or a gate: limits beyond which nothing is sent.
        """
        return self.defense.changes_updates or self.gate is not None

    def measures(self, server_round: int) -> bool:
        """Return whether this round's scores, defense, self-attack or gate (limits beyond which no
        update is sent) need the training's samples.
        """
        scores = bool(self.scores) and self.score_plan.includes(server_round)
        return bool(scores or self.withholds or self.truth or self.attack is not None)

    def replays(self, server_round: int, kept: Replayed | None, num_arrays: int) -> bool:
        """Return whether this round's training is replayed to check its update; always true with a
        gate, limits beyond which no update is sent.

        ``kept`` is the result of the client's latest replay, ``None`` before the first, and
        ``num_arrays`` the number of arrays that the server sent.
        """
        return self.gate is not None or is_due(self.replay_every, server_round, kept, num_arrays)

    def kept_of(self, server_round: int, kept: Replayed | None) -> Limits:
        """Return the largest numbers of samples and bytes that a capture may store of a round's
        training.

        If only a replay after the first one needs the samples, at most ``replay_samples`` are
        stored. ``kept`` is the result of the client's latest replay, ``None`` before the first.
        """
        few = self.replay_samples
        if few is None or kept is None or kept.again or self.measures(server_round):
            return self.limits
        return replace(self.limits, max_samples=min(few, self.limits.max_samples))


def train_and_report(
    plan: CapturePlan, app: Callable[[Message, Context], Message], message: Message, ctx: Context
) -> Message:
    """Call the app, put a record of the captured training beside its update, and return the reply.

    An app's error is returned as it is. So is the reply to a message without an ``ArrayRecord`` (a
    stage of secure aggregation) or with several. But if the plan has a defense or a gate (limits
    beyond which no update is sent), a reply whose arrays were neither defended nor judged is
    replaced by an error.
    """
    given = list(records_of(message.content, ArrayRecord).values())
    if len(given) != 1:
        if len(given) > 1 and plan.withholds:
            return withhold(message, f"expected one ArrayRecord, got {len(given)}", plan.sharing)
        return guard(plan, message, app(message, ctx))
    received = given[0]
    try:
        server_round = _round_of(message)
    # If the message names no valid round, the training cannot be measured. Its update is then sent
    # only without a defense and a gate.
    except ValueError as error:
        return refuse(message, str(error)) if plan.withholds else app(message, ctx)
    kept = Replayed.kept(ctx)
    replays = plan.replays(server_round, kept, len(received))
    captures = replays or plan.measures(server_round)
    looked_at = None if replays else kept
    looking = Glance(looked_at.names, partial(differing, received)) if looked_at else nullcontext()
    capturing = capture(plan.kept_of(server_round, kept)) if captures else nullcontext()
    with capturing as recorder, looking as glance:
        start = time.process_time()
        reply = app(message, ctx)
        train_seconds = time.process_time() - start
    if reply.has_error():
        return reply
    answers = list(records_of(reply.content, ArrayRecord).items())
    if len(answers) != 1:
        return guard(plan, message, reply)
    start = time.process_time()
    try:
        client_id = client_id_of(ctx)
        key, answer = answers[0]
        training = recorder.training() if recorder else None
        seen = SeenRound(received, answer, _count(reply), training, plan.spec)
        facts = seen.facts(kept, glance)
        if glance and looked_at:
            check = look(glance, seen, facts, looked_at, ctx)
        else:
            check, facts = replay_now(seen, facts, kept, server_round, ctx)
        sends = facts.sends if facts else PARAMETERS
        work = _Work(server_round, client_id, ctx, train_seconds, check, sends)
        done = _work(plan, seen, work)
        if plan.withholds and (problem := unseen(reply, released=key)):
            raise ValueError(problem)
    except Exception as error:  # an error of the audit must not end the training
        return withhold(message, error, plan.sharing) if plan.withholds else reply
    note = ClientNote(
        client_id=client_id,
        train_cpu_seconds=train_seconds,
        score_cpu_seconds=time.process_time() - start,
        reproducible=plan.withholds and plan.seed is not None,
        remark=" ".join(filter(None, (done.remark, done.unread))),
        own_config=not done.left_truth,
        training=facts,
        replay=check,
    )
    if done.session is None:
        remember(ctx, server_round, note, plan.score_plan.keep_rounds)
        remark = UNREAD if done.unread else ""
        told = plan.sharing.travelling(note, released_as_trained=True, remark=remark)
    else:
        keep_own(done.session, done.release, note)
        if done.release.refused:
            return refuse(message, REFUSED)
        unread = UNREAD if done.unread else ""
        remark = " ".join(filter(None, (done.remark, unread)))
        told = sent_note(done.session, done.release, note, remark)
        if done.release.update is not done.answer:
            reply.content[key] = _rewrite(answer, seen.received, done.release.update)
    reply.content[RECORD_KEY] = pack_note(told)
    return reply


def guard(plan: CapturePlan, message: Message, reply: Message) -> Message:
    """Return the reply to a training that was not captured, or an error if it holds arrays.

    The error is returned only if the plan has a defense or a gate (limits beyond which nothing is
    sent), and tells the server nothing of the client.
    """
    if plan.withholds and not reply.has_error() and (problem := unseen(reply)):
        return withhold(message, problem, plan.sharing)
    return reply


def _round_of(message: Message) -> int:
    """Return the number of a message's round; 0 if the server names none.

    Strategies of ``flwr.server`` name the round only as the message's group id.
    """
    group = message.metadata.group_id
    return server_round_of(message) or (int(group) if group.isdecimal() else 0)


@dataclass(frozen=True)
class _Done:
    """The result of defending and scoring the update of one captured training.

    Attributes:
        session: the client's round; ``None`` if no samples were used.
        answer: the update that the app returned; ``None`` if no samples were used.
        release: the defended update with its scores.
        remark: the sentence on the defense that travels to the server; empty without one.
        unread: the reason, for the client's owner, why no samples could be read off the captured
            training and nothing was scored; empty if samples were read.
        left_truth: whether the samples were written into a simulation's folder for the evaluator.
    """

    session: Session | None
    answer: Update | None
    release: Release
    remark: str = ""
    unread: str = ""
    left_truth: bool = False


@dataclass(frozen=True)
class _Work:
    """The facts about one captured training on which scores and defenses depend.

    Attributes:
        train_seconds: the CPU seconds of the training.
        check: the result of replaying the training.
        sends: the quantity that the client sends, in words, such as its parameters or its gradient.
    """

    server_round: int
    client_id: int
    context: Context
    train_seconds: float
    check: ReplayResult
    sends: str = PARAMETERS

    def explained(self) -> Explained:
        """Return whether the replay explains the sent update, with a sentence that scores' notes
        quote.
        """
        sentence = self.check.sentence
        if self.check.explains and not self.check.replayed:
            sentence = f"whether the captured training {NOT_CHECKED}{sentence}"
        return Explained(sentence, not self.check.explains)


def _work(plan: CapturePlan, seen: SeenRound, work: _Work) -> _Done:
    """Return the defended update of a captured training with its scores and the client's attack on
    it.

    The plan decides what is computed. If it has a gate, the result says whether the update exceeds
    the gate's limits. If it has a simulation's folder for the truth, the samples are first written
    there. ``work`` has the round, the training's CPU seconds and the result of its replay.

    Raises:
        ValueError: the plan has a defense or a gate, and the update cannot be defended or judged.
    """
    measures = plan.withholds or bool(plan.scores) or plan.attack is not None
    if seen.capture is None or not (measures or plan.truth):
        return _Done(None, None, _NOTHING)
    if plan.withholds and not seen.answer:
        raise ValueError("an update under a mask can neither be defended nor judged here")
    left_truth = False
    if plan.withholds and (extra := set(seen.sent) - set(seen.received)):
        raise ValueError(f"the reply holds arrays that the server did not send: {sorted(extra)}")
    try:
        if plan.truth is not None:
            samples = private_samples(seen.training, seen.num_examples)
            plan.truth.write(work.server_round, work.client_id, Truth(samples, samples))
            left_truth = True
            if not measures:
                return _Done(None, None, _NOTHING, left_truth=True)
        if work.sends != PARAMETERS:
            raise ValueError(f"it sends {work.sends} and not its parameters")
        read = read_round(seen.training, seen.received, seen.num_examples, plan.spec)
    except ValueError as error:
        is_other = work.sends != PARAMETERS
        if plan.gate is not None or (is_other and plan.withholds):
            raise
        unread = f"Neither scores nor samples were read off the training: {error}."
        if plan.withholds:
            defended = _defend_unread(plan, seen, work, str(error))
            return replace(defended, unread=unread, left_truth=left_truth)
        _probe(plan, seen, work, unread)
        return _Done(None, None, _NOTHING, "", unread, left_truth)
    session = _session(plan, read.gradient_map, read.spec, read.schedule, work)
    session.private.append(read.private)
    session.defended.append(read.private)
    sent = {name: seen.sent[name].to(value.dtype) for name, value in read.params.items()}
    answer = replace(read.raw, delta=subtract(sent, read.params))
    trained = Trained(read.params, read.buffers, read.raw, answer)
    explained = work.explained()
    done = release(session, trained, lambda _: explained)
    return _Done(session, answer, done, _defended_by(plan), left_truth=plan.truth is not None)


def _defended_by(plan: CapturePlan) -> str:
    """Return the sentence on the client's defense for the server; empty without a defense.

    The sentence names the plan's own defense. If the client's limits required a stronger one, the
    server must not know.
    """
    return f"{DEFENDED_BY} {type(plan.defense).__name__}." if plan.defense.changes_updates else ""


def _defend_unread(plan: CapturePlan, seen: SeenRound, work: _Work, why: str) -> _Done:
    """Return the update under a defense that needs nothing but the update, such as pruning, without
    scores.

    The function serves if samples or steps cannot be read off the training, for example with Adam;
    ``why`` is the reason in words.

    Raises:
        ValueError: the defense needs a sample or a setting of the training, or the client sends
            something else than its trained parameters. The message says what can be used in its
            place.
    """
    named = name_tensors(seen.received, seen.training.roots)
    trained = seen.trained()
    if not seen.received.keys() == seen.sent.keys() == named.keys() or not_sent(seen, trained):
        raise ValueError(
            f"{why}, and what is sent is not the parameters of the captured model as they were "
            f"trained, so that its update cannot be told"
        )
    params: Params = {
        name: value.to(named[name].before.dtype)
        for name, value in seen.received.items()
        if named[name].is_parameter
    }
    delta = {name: seen.sent[name].to(value.dtype) - value for name, value in params.items()}
    buffers = {name: value for name, value in seen.sent.items() if name not in params}
    answer = Update(delta, buffers, UntoldSchedule(why), seen.num_examples)
    # Scores, attacks and limits on them are left out, as they need samples.
    bare = replace(plan, scores={}, attack=None, gate=None)
    model = GradientMap(seen.training.roots[0].copy)
    spec = plan.spec or InputSpec((1, 1, 1), 1, known=False)
    session = _session(bare, model, spec, answer.schedule, work)
    try:
        done = release(session, Trained(params, buffers, answer, answer), lambda _: Explained())
    except ValueError as error:
        raise ValueError(
            f"{type(plan.defense).__name__} cannot be applied, as {why} ({error}). Use a defense "
            f"that needs the update alone, such as GradientPruning(), GaussianNoise(noise_std=0.1, "
            f"relative_to='norm') or Clipping(), or train by SGD at a constant rate"
        ) from error
    return _Done(session, answer, done, _defended_by(plan))


def _probe(plan: CapturePlan, seen: SeenRound, work: _Work, remark: str) -> None:
    """Attack the update of a single step on few samples, and keep the result for the client's
    owner.

    This is done if no attack fits all steps of the training, as ``remark`` says, and if the plan
    has a self-attack and a folder for the owner's record. The server is told nothing of it.
    """
    attack, training = cast(Any, plan.attack), seen.training
    due = attack is not None and attack.includes(work.server_round)
    if not due or plan.folder is None or not training.steps:
        return
    try:
        rate = float(training.steps[0].options[0]["lr"])
        step = LocalSchedule(rate, 1, max(training.batch_sizes))
        read = read_round(training, seen.received, seen.num_examples, plan.spec, step)
        start = Observation(work.server_round, work.client_id, read.params, read.buffers, read.raw)
        found = attack.probe(read.gradient_map, read.spec, start, read.private)
        from flwr_leakage.audit.own_record import write_own_probes

        note = ClientNote(work.client_id, remark=remark)
        folder = own_folder(plan.folder, work.context, work.client_id)
        write_own_probes(folder, work.server_round, note, seen.num_examples, found)
    except Exception:  # an error in this additional attack must not end the training
        _LOG.exception("flwr_leakage: one step on few samples was not probed")


def _session(
    plan: CapturePlan,
    gradient_map: GradientMap,
    spec: InputSpec,
    schedule: LocalSchedule,
    work: _Work,
) -> Session:
    """Return the client's round for a training with this model and loss, inputs and schedule."""
    audit = ClientAudit(
        gradient_map,
        spec,
        schedule,
        defense=plan.defense,
        scores=plan.scores,
        seed=plan.seed,
        score_plan=plan.score_plan,
        attack=plan.attack,
        share=plan.share,
        gate=plan.gate,
        folder=plan.folder,
    )
    session = Session(audit, work.server_round, work.client_id, work.context)
    session.train_seconds = work.train_seconds
    return session


def _rewrite(answer: ArrayRecord, received: Mapping[str, Tensor], released: Update) -> ArrayRecord:
    params: Params = {name: received[name] + value for name, value in released.delta.items()}
    return write_arrays(answer, params, released.buffers)


def _count(reply: Message) -> int:
    """Return the number of samples that the client reports; 0 if it reports none."""
    for metrics in records_of(reply.content, MetricRecord).values():
        for name in ("num-examples", "num_examples"):  # apps of ``flwr.client`` use the second name
            if isinstance(count := metrics.get(name), int | float):
                return int(count)
    return 0
