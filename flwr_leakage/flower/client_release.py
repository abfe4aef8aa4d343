"""Defend one update, score it, attack it, and compare the results with the client's own limits."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context

from flwr_leakage.audit.gate import Gate, Judgement
from flwr_leakage.audit.note import ReplayKind, ReplayResult
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.error_feedback import with_error_feedback
from flwr_leakage.flower.client_audit import ClientAudit
from flwr_leakage.flower.client_session import Session
from flwr_leakage.params import Params
from flwr_leakage.per_sample import explain_update
from flwr_leakage.records import Batch, Exposure, Measurement, Update
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.scores.score_round import Account, score_round

if TYPE_CHECKING:
    from flwr_leakage.audit.self_attack import SelfAttacked
else:  # a client without self-attack works without the packages that attacks need
    SelfAttacked = Any

ACCOUNT_KEY = "flwr-leakage-account"
"""The key in the client's state of the record on how much CPU time its scores may still take."""
EXPLAINED_KEY = "flwr-leakage-explained"
"""The key in the client's state of the record on whether a replay with the scored model explained
the client's update."""
CARRIED_KEY = "flwr-leakage-carried"
"""The key in the client's state of the remainder of error feedback, the part of earlier updates
that is added to the next one. The remainder is never sent."""
PAID = 1e-300
"""The ``relative_cost`` of scores under a second defense in one round: almost none of the
training's CPU time. That time was already counted for the scores under the first defense."""


@dataclass(frozen=True)
class Explained:
    """The result of checking whether the scored model explains the client's update.

    Attributes:
        sentence: the result in words, with the number of the checked round.
        fails: whether the check found that the model does not explain the update. It is ``False``
            too if nothing was checked; the sentence says so.
        replay: the result of replaying this round's training; ``None`` if it was not replayed.
        seconds: the CPU seconds that the check took.
    """

    sentence: str = ""
    fails: bool = False
    replay: ReplayResult | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    """The parameters that a client received, and the update by its training.

    Attributes:
        params: the received parameters, by name.
        buffers: the received buffers, by name.
        raw: the update as it was trained.
        answer: the update that the app returns and that is to be defended. It differs from ``raw``
            if mods changed it.
    """

    params: Params
    buffers: Params
    raw: Update
    answer: Update


@dataclass(frozen=True)
class Try:
    """The judgement by the gate, the client's own limits, on the update under one defense.

    Attributes:
        defense: the defense with its settings, such as "under Clipping(max_norm=1.0)", or "without
            a defense".
        judgement: whether the update passes, and the reasons.
    """

    defense: str
    judgement: Judgement


@dataclass(frozen=True)
class Release:
    """The defended update of a round before it is sent, with its scores and the judgement of the
    gate, the client's own limits.

    Attributes:
        update: the defended update, which is sent unless the gate refuses it.
        measurements: the scores of the update.
        attacked: the result of the client's attack on the update; ``None`` if there was none.
        explained: whether the scored model explains the update.
        tries: the gate's judgements, one for each defense that was tried; empty without a gate.
        exposure: the client's samples and updates; ``None`` if no mini-batch passed through
            ``encode``.
        left: the part that a defense with error feedback left out of the update, which is added to
            the next update; ``None`` without error feedback.
        seconds: the CPU seconds of scores and attacks, without the replay.
    """

    update: Update
    measurements: tuple[Measurement, ...] = ()
    attacked: SelfAttacked | None = None
    explained: Explained = Explained()
    tries: tuple[Try, ...] = ()
    exposure: Exposure | None = None
    left: Params | None = None
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Return whether the update exceeds the client's own limits, so that it is not sent."""
        return bool(self.tries) and not self.tries[-1].judgement.passes


def release(
    session: Session, trained: Trained, explain: Callable[[Exposure], Explained]
) -> Release:
    """Return a defended update that passes the gate, the client's own limits, with its scores.

    The client's own defense is tried first, then the gate's stronger ones until the update passes.
    If none passes, the result is marked as refused. Without a gate, the client's own defense is the
    only one. ``explain`` checks whether the scored model explains the update.

    Raises:
        ValueError: the client's own defense cannot be applied, or the gate cannot judge as no
            mini-batch was seen.
    """
    audit = session.audit
    done, tries = _one(session, trained, audit.defense, 0, explain), []
    if audit.gate is None:
        return done
    if done.exposure is None:
        raise ValueError(
            "the training loop must pass each mini-batch through flwr_leakage.flower.encode, "
            "as the gate needs it; it passed none"
        )
    tries.append(_judge(audit.gate, audit.defense, done, trained))
    for number, defense in enumerate(audit.gate.stronger, start=1):
        if tries[-1].judgement.passes:
            break
        seconds, known = done.seconds, done.explained
        try:
            done = _one(session, trained, defense, number, lambda _, k=known: k)  # type: ignore[misc]
        except ValueError as error:
            failed = Judgement(False, (f"it cannot be applied: {error}",))
            tries.append(Try(_named(defense), failed))
            continue
        done = replace(done, seconds=done.seconds + seconds)
        tries.append(_judge(audit.gate, defense, done, trained))
    return replace(done, tries=tuple(tries))


def defend(session: Session, trained: Trained, defense: Defense, number: int = 0) -> Release:
    """Return the update that training made, defended by ``defense`` and without scores.

    The result has an ``exposure`` if the round's mini-batches passed through ``encode``. ``number``
    is the place of the defense among those that are tried in the round, from 0. Each place has its
    own random draws.
    """
    purpose = f"defense, try {number}" if number else "defense"
    randomness, answer = session.randomness(purpose), trained.answer
    local_round = None
    if session.private:
        # Only the first epoch's samples are taken, as later epochs repeat them. Samples that no
        # step uses do not affect the update.
        used = answer.schedule.num_samples_used(answer.num_examples)
        private = Batch.concatenate(session.private)[:used]
        defended = Batch.concatenate(session.defended)[:used]
        params, buffers = trained.params, trained.buffers
        local_round = LocalRound(
            session.audit.gradient_map, params, buffers, private, defended, answer.num_examples
        )
    left = None
    if defense.carries:
        carried = _carried(session.context, answer.delta)
        released, left = with_error_feedback(defense, answer, carried, randomness, local_round)
    else:
        released = defense.on_update(answer, randomness, local_round)
    exposure = None
    if local_round is not None:
        exposure = Exposure(params, buffers, private, defended, trained.raw, released)
    return Release(released, exposure=exposure, left=left)


def _carried(context: Context, like: Params) -> Params | None:
    """Return the remainder of error feedback from the client's state, by parameter; ``None`` if
    there is none.

    The remainder is the part that defenses left out of earlier updates. It has the dtypes and
    devices of ``like``.
    """
    kept = context.state.array_records.get(CARRIED_KEY)
    if kept is None:
        return None
    return {name: value.to(like[name]) for name, value in kept.to_torch_state_dict().items()}


def carry_on(session: Session, done: Release) -> None:
    """Keep the remainder of error feedback, ``done.left``, in the client's state for the next
    round.

    Nothing is kept if the update exceeded the client's own limits and is not sent.
    """
    if done.left is not None and not done.refused:
        session.context.state[CARRIED_KEY] = ArrayRecord(OrderedDict(done.left))


def explain_by_replay(session: Session, exposure: Exposure) -> Explained:
    """Return whether the scored model explains the update, as checked now or in an earlier round.

    The check repeats the local training with the gradient map from which scores are computed, and
    compares the two updates. ``check_update`` and ``check_rounds`` of ``ClientAudit`` decide
    whether the check is made in this round. The client's state keeps the result.
    """
    audit, states = session.audit, session.context.state.config_records
    if not audit.always_checks(session.server_round):
        if audit.check_update == "never" or not _looks(audit, session.server_round):
            return Explained()
        if EXPLAINED_KEY in states:
            kept = states[EXPLAINED_KEY]
            return Explained(str(kept["sentence"]), bool(kept["fails"]))
    start = time.process_time()
    found = explain_update(audit.gradient_map, exposure)
    # Without a distance no replay was made, as samples are missing, and the check counts no time.
    seconds = time.process_time() - start if found.distance is not None else 0.0
    sentence = f"in round {session.server_round}, {found.sentence}"
    session.context.state[EXPLAINED_KEY] = ConfigRecord(
        {"sentence": sentence, "fails": found.fails}
    )
    replay = None
    if found.distance is not None:
        kind: ReplayKind = "refuted" if found.fails else "explained"
        replay = ReplayResult(kind, found.distance, found.sentence)
    return Explained(sentence, found.fails, replay, seconds)


def _looks(audit: ClientAudit, server_round: int) -> bool:
    """Return whether a round's update is scored, attacked, or compared with the client's limits."""
    attacks = audit.self_attack is not None and audit.self_attack.includes(server_round)
    return bool(attacks or audit.gate or (audit.scores and audit.score_plan.includes(server_round)))


def _one(
    session: Session,
    trained: Trained,
    defense: Defense,
    number: int,
    explain: Callable[[Exposure], Explained],
) -> Release:
    """Return the update under one defense, with its scores and the client's attack on it.

    ``number`` is the place of the defense among those that are tried in this round, from 0. For the
    first defense, the cost of the scores may be limited relative to the CPU seconds of the
    training.
    """
    done = defend(session, trained, defense, number)
    if (exposure := done.exposure) is None:
        return done
    explained = explain(exposure)
    start = time.process_time()
    plan = _plan(session.audit, second=number > 0)
    train_seconds = 0.0 if number else session.train_seconds
    measurements = _score(session, exposure, train_seconds, explained, plan)
    attacked = _attack(session, exposure)
    seconds = time.process_time() - start
    return replace(
        done, measurements=tuple(measurements), attacked=attacked, explained=explained,
        seconds=seconds,
    )  # fmt: skip


def _judge(gate: Gate, defense: Defense, done: Release, trained: Trained) -> Try:
    doubts = []
    if done.explained.fails:
        doubts.append(f"the scored model does not explain the update: {done.explained.sentence}")
    used = trained.raw.schedule.num_samples_used(trained.raw.num_examples)
    kept = 0 if done.exposure is None else len(done.exposure.private)
    if kept < used:
        doubts.append(f"only {kept} of the {used} samples that it used were kept")
    return Try(_named(defense), gate.judge(done.measurements, done.attacked, doubts))


def _named(defense: Defense) -> str:
    """Return words for a defense, such as “under Clipping(max_norm=1.0)”, with at most 200
    characters of its settings.
    """
    if not (defense.changes_updates or defense.encodes_batches):
        return "without a defense"
    named = repr(defense)[:200] if is_dataclass(defense) else type(defense).__name__
    return f"under {named}"


def _plan(audit: ClientAudit, second: bool) -> ScorePlan:
    """Return the plan by which the update is scored in this round.

    If the gate has limits on scores, every round is scored at any cost. Otherwise the plan may
    limit the CPU time of scores to a share of the training's. The scores under a ``second`` defense
    in the same round then get no further time.
    """
    if audit.gate is not None and audit.gate.scores:
        return replace(audit.score_plan, every=1, relative_cost=None)
    if second and audit.score_plan.relative_cost is not None:
        return replace(audit.score_plan, relative_cost=PAID)
    return audit.score_plan


def _score(
    session: Session,
    exposure: Exposure,
    train_seconds: float,
    explained: Explained,
    plan: ScorePlan,
) -> list[Measurement]:
    audit, states = session.audit, session.context.state.config_records
    kept = cast(dict[str, float], dict(states.get(ACCOUNT_KEY, ConfigRecord())))
    measurements, account = score_round(
        audit.scores,
        audit.gradient_map,
        exposure,
        plan,
        Account(**kept),
        server_round=session.server_round,
        train_seconds=train_seconds,
        seed=session.seed("score"),
        warnings=[explained.sentence] if explained.fails else [],
    )
    session.context.state[ACCOUNT_KEY] = ConfigRecord(asdict(account))
    return measurements


def _attack(session: Session, exposure: Exposure) -> SelfAttacked | None:
    """Return the result of the client's attack on its update, or ``None`` if no attack is due.

    An error of the attack is part of the result, and is not raised.
    """
    audit, attack = session.audit, session.audit.self_attack
    if attack is None or not attack.includes(session.server_round):
        return None
    return attack.run(
        audit.gradient_map,
        audit.spec,
        exposure,
        server_round=session.server_round,
        client_id=session.client_id,
    )
