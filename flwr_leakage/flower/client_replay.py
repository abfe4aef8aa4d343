"""Decide when a client's training is replayed, and report on the rounds in which it is not.

A replay costs as much as the training. The first training of a client is replayed, then one every
``replay_every`` rounds, and the next one after a change. In the other rounds only the parameters at
the start and the end, the optimizer's settings and the number of steps are observed, which costs
little.
"""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flwr_leakage.audit.note import ReplayKind, ReplayResult
from flwr_leakage.capture import (
    CapturedTraining,
    Glance,
    ReplayCheck,
    TrainingFacts,
    check_replay,
    facts_of,
)
from flwr_leakage.capture.check import is_rounded, variate_names
from flwr_leakage.capture.counting import parameters_of
from flwr_leakage.capture.glance import some
from flwr_leakage.capture.names import as_received, name_live, name_tensors
from flwr_leakage.capture.sent import PARAMETERS, first_variates
from flwr_leakage.flower.arrays import differing, tensors_of, unequal
from flwr_leakage.records import InputSpec

REPLAY_KEY = "flwr-leakage-replay"
"""The key in the client's state of the result of the latest replay."""

VARIATES_KEY = "flwr-leakage-variates"
"""The key in the client's state of its control variates c_i (SCAFFOLD): the initial ones plus the
sum of the changes that the client has sent."""

MASKED = (
    "what was sent is masked (secure aggregation) and was not compared: clipping or noise between "
    "the training and the mask would not be seen"
)
"""The sentence on a replay for the client's owner if secure aggregation masks the sent arrays."""
_NUMBERS = ("learning_rate", "momentum", "weight_decay", "num_steps", "batch_size")
"""Settings that some training methods vary from round to round. Only the first change of each makes
the next training be replayed."""
_KINDS = (
    "optimizer", "batch_norm", "randomness", "precision", "loss", "label_smoothing", "shape",
    "num_classes", "normalization", "mean", "std", "box", "rewritten",
)  # fmt: skip
_LISTS = ("varying", "again", "names", "untrained")
"""Fields of :class:`Replayed` that are tuples, which JSON returns as lists."""
_NOT_SEEN = "its mini-batches were not looked at, and its samples and steps do not tell them"
_WORDS = {"rewritten": "change of gradients before a step"}


@dataclass(frozen=True)
class Replayed:
    """The result of a client's latest replay, which the client's state keeps from round to round.

    Attributes:
        server_round: the number of the replayed round, or 0 if the server named none.
        explains: whether the replay explained the update that the client sent.
        sentence: the result in words.
        facts: the facts about the replayed training; ``None`` if nothing was captured.
        varying: the names of settings that have changed since the client's first replay, and whose
            change was followed by a replay.
        again: the reasons why the next training must be replayed; empty if there are none.
        names: for each parameter of the optimizer, in its order, the name under which it is
            received; empty for one that is not received.
        untrained: the names of the received parameters that the optimizer did not hold.
        writes: the number of writes to the gradients before the first step; see ``writes_of``.
        num_examples: the number of samples that the client reported.
        num_arrays: the number of received arrays, if the client sent as many, so that later rounds
            can be compared array by array; 0 otherwise.
    """

    server_round: int
    explains: bool
    sentence: str
    facts: TrainingFacts | None
    varying: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    writes: int = -1
    num_examples: int = 0
    num_arrays: int = 0

    def keep(self, context: Context) -> None:
        """Write this result of a replay into the client's state."""
        content = {**vars(self), "facts": self.facts.to_dict() if self.facts else None}
        context.state[REPLAY_KEY] = ConfigRecord({"replay": json.dumps(content)})

    @staticmethod
    def kept(context: Context) -> "Replayed | None":
        """Return the result of the latest replay from a client's state; ``None`` if there is none.

        ``None`` is also returned if an older version of this package wrote a result that this one
        cannot read. The next training is then replayed as if it were the first.
        """
        record = context.state.get(REPLAY_KEY)
        if not isinstance(record, ConfigRecord):
            return None
        try:
            return _read(str(record["replay"]))
        except (KeyError, TypeError, ValueError):
            return None


@lru_cache(maxsize=256)
def _read(text: str) -> Replayed:
    content = json.loads(text)
    facts = content.pop("facts")
    content |= {name: tuple(content[name]) for name in _LISTS}
    return Replayed(**content, facts=TrainingFacts.from_dict(facts) if facts else None)


def is_due(
    every: int | None, server_round: int, kept: Replayed | None, num_arrays: int | None = None
) -> bool:
    """Return whether a client's training is replayed: repeated to check the update that it sends.

    ``every`` is the number of rounds from one replay to the next; with ``None`` only the first
    training is replayed. ``server_round`` is 0 if it is unknown. ``kept`` is the result of the
    latest replay, ``None`` before the first. ``num_arrays`` is the number of received arrays; a
    replay is due if it has changed.
    """
    if kept is None or num_arrays not in (None, kept.num_arrays):
        return True
    if every is None:
        return False
    return bool(kept.again) or not 0 < server_round - kept.server_round < every


@dataclass(frozen=True)
class SeenRound:
    """One training of a client, with the received and the sent arrays.

    Attributes:
        arrays: the arrays that the server sent.
        answer: the arrays that the client sends; empty if secure aggregation masks them.
        reported: the number of samples that the app reports to the server; 0 if it reports none.
        capture: the captured training; ``None`` if a :class:`Glance` observed it instead.
        spec: shapes and normalisation of the inputs, if the client's owner gives them.
    """

    arrays: ArrayRecord
    answer: ArrayRecord
    reported: int
    capture: CapturedTraining | None
    spec: InputSpec | None = None

    @cached_property
    def received(self) -> Mapping[str, Tensor]:
        """Return the arrays that the server sent, as tensors by name."""
        return tensors_of(self.arrays)

    @cached_property
    def sent(self) -> Mapping[str, Tensor]:
        """Return the arrays that the client sends, as tensors by name."""
        return tensors_of(self.answer)

    @property
    def num_examples(self) -> int:
        """Return the number of samples that the app reported, else the captured number, else 0."""
        seen = max(1, sum(self.capture.batch_sizes)) if self.capture else 0
        return self.reported or seen

    @property
    def training(self) -> CapturedTraining:
        """Return the captured training.

        Raises:
            ValueError: nothing was captured.
        """
        if self.capture is None:
            raise ValueError("only the optimizer's steps of this training were seen")
        return self.capture

    def facts(self, kept: Replayed | None, glance: Glance | None) -> TrainingFacts | None:
        """Return the facts about the client's training; ``None`` if they cannot be determined.

        ``kept`` is the result of the client's latest replay, ``None`` before the first. ``glance``
        observed the settings and steps of a training that was not captured; ``None`` if it was.
        """
        try:
            known = kept.facts if kept else None
            if self.capture is None:
                if not (glance and kept and known):
                    return None
                found = glance.facts(known)
                # Numbers of samples that are not reported are assumed to be those of the latest
                # replay.
                count = self.num_examples or kept.num_examples
                if _is_cut_alike(known, kept.num_examples, found.num_steps, count):
                    return replace(found, counted=known.counted and self.reported > 0)
                return replace(found, unscheduled=found.unscheduled or _NOT_SEEN, counted=False)
            found = facts_of(self.capture, self.num_examples, self.reported, self.spec)
            if known and not self.capture.complete and known.rewritten > len(self.capture.steps):
                # The first step with changed gradients may not be among the recorded steps, so its
                # number is that of the replayed training.
                why = found.unscheduled or known.unscheduled
                found = replace(found, rewritten=known.rewritten, unscheduled=why)
            return found
        except Exception:  # nothing was captured; the sentence on the replay gives the reason
            return None

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters after training, by received name."""
        live = name_live(self.received, [root.live for root in self.training.roots])
        return {name: tensor.detach() for name, (_, _, tensor) in live.items()}


def _is_cut_alike(known: TrainingFacts, count: int, num_steps: int, now: int) -> bool:
    """Return whether a training cuts its samples into batches as an earlier, captured one did.

    This training took ``num_steps`` steps on ``now`` samples. The captured one took
    ``known.num_steps`` steps on ``count`` samples. Both are assumed to have the same batch size.
    The result is true if both took the same number of epochs, with or without a last small batch,
    or the same number of steps.
    """
    if (now, num_steps) == (count, known.num_steps):
        return True
    if not known.batch_size:
        return False
    kinds = [
        (max(1, -(-n // known.batch_size)), max(1, n // known.batch_size)) for n in (count, now)
    ]
    for before, after in zip(*kinds, strict=True):
        if known.num_steps % before == 0:  # the steps were a whole number of epochs
            return num_steps == known.num_steps // before * after
    return num_steps == known.num_steps


def replay_now(
    seen: SeenRound,
    facts: TrainingFacts | None,
    kept: Replayed | None,
    server_round: int,
    context: Context,
) -> tuple[ReplayResult, TrainingFacts | None]:
    """Replay a captured training, and keep the result in the client's state.

    The result is returned with ``facts``, to which the quantity is added that the client sends
    (parameters, an update, a gradient, …). ``facts`` are ``None`` if they cannot be determined.
    ``kept`` is the result of the latest replay, ``None`` before the first. ``server_round`` is 0 if
    the server named none.
    """
    names: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    try:
        received, sent = seen.received, seen.sent
        own = _variates(seen.training, received, sent, context)
        check = check_replay(seen.training, received, sent or seen.trained(), own)
        if check.explains:
            ours = as_received(sent, received, seen.training.roots) if sent else received
            exchanged = set(ours) - set(check.personal)
            names, untrained = _names(seen.training, received, exchanged)
    except Exception as error:
        check = ReplayCheck(None, problem=str(error) or type(error).__name__)
    facts = facts and facts.sending(check.sends)
    plain = check.sends == PARAMETERS and len(seen.answer or seen.arrays) == len(seen.arrays)
    sentence, kind = check.sentence(), _kind(check, seen)
    if not seen.answer and check.residual is not None:
        sentence += f"; {MASKED}"
    varying = {*kept.varying, *kept.again, *_changed(facts, kept)} if kept else set()
    found = Replayed(
        server_round,
        check.explains,
        sentence,
        facts,
        varying=tuple(name for name in _NUMBERS if name in varying),
        names=names,
        untrained=untrained,
        writes=seen.training.writes,
        num_examples=seen.num_examples,
        num_arrays=len(seen.arrays) if plain else 0,
    )
    found.keep(context)
    return ReplayResult(kind, check.residual, sentence), facts


def _variates(
    training: CapturedTraining,
    received: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    context: Context,
) -> dict[str, Tensor]:
    """Return the client's control variates (SCAFFOLD) before this training, by received name.

    The variates after the training are stored in the client's state. The result is empty if
    ``sent`` has no further arrays with the parameters' shapes, as control variates would have.
    """
    fitting = variate_names(name_tensors(received, training.roots), received)
    if not fitting or any(name not in sent for name in fitting.values()):
        return {}
    kept = context.state.get(VARIATES_KEY)
    if isinstance(kept, ArrayRecord):
        own: dict[str, Tensor] = dict(kept.to_torch_state_dict())
    else:
        changes = {name: sent[other] for name, other in fitting.items()}
        first = first_variates(changes, received)
        own = {other: first[name] for name, other in fitting.items()}
    context.state[VARIATES_KEY] = ArrayRecord({
        name: value + sent[name] for name, value in own.items()
    })  # fmt: skip
    return own


def _kind(check: ReplayCheck, seen: SeenRound) -> ReplayKind:
    if check.residual is None:
        return "undone"
    if not check.explains:
        return "refuted"
    return "explained" if seen.answer else "masked"


def _names(
    training: CapturedTraining, received: Mapping[str, Tensor], sent: Container[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the received names of the optimizer's parameters, and those of the other parameters.

    The first tuple has a name for each parameter of the optimizer, the second for each other
    parameter of the model. ``sent`` holds the names of the exchanged arrays. For a parameter that
    is not exchanged, such as one of a personal head, the first tuple has an empty name, and the
    second has none.
    """
    found = name_tensors(received, training.roots)
    own = {
        id(named.before): name
        for name, named in found.items()
        if named.is_parameter and name in sent
    }
    held = parameters_of(training.optimizer) if training.optimizer else []
    names = tuple(own.pop(id(parameter), "") for parameter in held)
    return names, tuple(own.values())


def look(
    glance: Glance,
    seen: SeenRound,
    facts: TrainingFacts | None,
    kept: Replayed,
    context: Context,
) -> ReplayResult:
    """Return the result for a training that is not replayed. If something changed, the next
    training will be replayed.

    A replay repeats the training to check the sent update. Here ``glance`` only observed the
    parameters at the start and the end, the optimizer's settings and the number of steps. ``facts``
    are ``None`` if they cannot be determined. ``kept`` is the result of the latest replay.
    """
    if not kept.explains:
        sentence = f"not replayed since round {kept.server_round}, where {kept.sentence}"
        return ReplayResult("differs", sentence=sentence)
    try:
        causes = _causes(glance, seen, kept)
    except Exception as error:
        causes = (str(error) or type(error).__name__,)
    changed = _changed(facts, kept, glance.writes)
    again = (*causes, *(name for name in changed if name not in kept.varying))
    if again:
        replace(kept, again=again).keep(context)
    if causes:
        sentence = f"not replayed in this round, and {'; '.join(causes)}"
        sentence += "; results are no evidence of safety"
        return ReplayResult("differs", sentence=sentence)
    told = facts is not None and kept.facts is not None
    sentence = _unreplayed(kept, changed, told=told, masked=not seen.answer)
    return ReplayResult("unchanged", sentence=sentence)


def _unreplayed(kept: Replayed, changed: tuple[str, ...], *, told: bool, masked: bool) -> str:
    """Return a sentence on a training that was not replayed and whose update nothing seems to have
    changed.

    ``kept`` is the result of the latest replay. ``changed`` names the settings that differ from the
    replayed training. ``told`` says that the facts of both trainings are known, so that settings
    could be compared. ``masked`` says that the sent arrays could not be compared.
    """
    end = "not the end, which was masked" if masked else "end"
    looked = f"start, optimizer, settings, steps, {end}" if told else f"start, {end}"
    then = f"round {kept.server_round}, where {kept.sentence}"
    if not changed:
        return (
            f"not replayed in this round; nothing that was looked at ({looked}) differs from {then}"
        )
    other = " and ".join(_WORDS.get(name, name.replace("_", " ")) for name in changed)
    return (
        f"not replayed in this round; it trained with another {other} than in {then}; nothing else "
        f"that was looked at ({looked}) differs"
    )


def _causes(glance: Glance, seen: SeenRound, kept: Replayed) -> tuple[str, ...]:
    # Under secure aggregation the sent arrays are masked and cannot be compared, so that none of
    # them counts as different.
    if not seen.answer:
        return glance.causes(lambda _: [])
    causes = glance.causes(partial(not_sent, seen))
    if other := unequal(seen.answer, seen.arrays, kept.untrained):
        causes = (*causes, f"{some(other)} not trained, and not sent as received")
    return causes


def not_sent(seen: SeenRound, trained: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the trained tensors that differ from those that the client sends.

    ``trained`` are the tensors after training by received name. The result is empty if all
    differences are small enough to be rounding.
    """
    names = differing(seen.answer, trained)
    if names and is_rounded(trained, seen.received, seen.sent):
        return []
    return names


def _changed(
    facts: TrainingFacts | None, kept: Replayed, writes: int | None = None
) -> tuple[str, ...]:
    """Return the names of the settings in which a training differs from the latest replayed one.

    ``facts`` are those of this training, ``None`` if they cannot be determined; then the result is
    empty. ``kept`` has the facts of the replayed one. ``writes`` is the number of writes to the
    gradients before this training's first step, ``None`` if unknown.
    """
    if facts is None or kept.facts is None:
        return ()
    then = kept.facts
    names = [n for n in (*_NUMBERS, *_KINDS) if getattr(facts, n) != getattr(then, n)]
    if writes not in (None, kept.writes) and "rewritten" not in names:
        names.append("rewritten")
    if facts.unscheduled != then.unscheduled:
        names.append("schedule")
    return tuple(names)
