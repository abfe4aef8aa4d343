"""When a client's training is replayed, and what is said of the rounds in which it is not.

A replay costs as much as the training. The first training of a client is replayed, then one every
``replay_every`` rounds, and the next one after a change. What is seen between them costs little.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flwr_leakage.audit.note import ReplayResult
from flwr_leakage.capture import (
    CapturedTraining,
    Glance,
    ReplayCheck,
    TrainingFacts,
    check_replay,
    facts_of,
)
from flwr_leakage.capture.names import name_live
from flwr_leakage.flower.arrays import differing

REPLAY_KEY = "flwr-leakage-replay"
"""The record of the client's own state that says what the latest replay found."""

MASKED = (
    "what was sent is masked (secure aggregation) and was not compared: clipping or noise between "
    "the training and the mask would not be seen"
)
_NUMBERS = ("learning_rate", "momentum", "weight_decay", "num_steps", "batch_size")
"""Settings that may vary by round as a matter of course: their first change is replayed."""
_KINDS = (
    "optimizer", "batch_norm", "randomness", "precision", "loss", "shape", "num_classes", "mean",
    "std", "rewritten",
)  # fmt: skip
_WORDS = {"rewritten": "change of gradients before a step"}


@dataclass(frozen=True)
class Replayed:
    """What the latest replay of a client found.

    Attributes:
        server_round: of it, or 0 where there was none.
        explains: whether it explained the update.
        sentence: the result in words.
        facts: how the client trained then; ``None`` where nothing was captured.
        varying: settings that have changed since the first replay and were replayed afterwards.
        again: why the next training is to be replayed; empty where it need not be.
    """

    server_round: int
    explains: bool
    sentence: str
    facts: TrainingFacts | None
    varying: tuple[str, ...] = ()
    again: tuple[str, ...] = ()

    def keep(self, context: Context) -> None:
        """Write it into the client's state."""
        content = {**vars(self), "facts": self.facts.to_dict() if self.facts else None}
        context.state[REPLAY_KEY] = ConfigRecord({"replay": json.dumps(content)})

    @staticmethod
    def kept(context: Context) -> "Replayed | None":
        """Read it there; ``None`` where this client has not trained yet."""
        record = context.state.get(REPLAY_KEY)
        if not isinstance(record, ConfigRecord):
            return None
        return _read(str(record["replay"]))


@lru_cache(maxsize=256)
def _read(text: str) -> Replayed:
    content = json.loads(text)
    facts = content.pop("facts")
    return Replayed(
        facts=TrainingFacts.from_dict(facts) if facts else None,
        varying=tuple(content.pop("varying")),
        again=tuple(content.pop("again")),
        **content,
    )


def is_due(every: int | None, server_round: int, kept: Replayed | None) -> bool:
    """Whether a client's training is replayed.

    Args:
        every: rounds from one replay to the next; ``None`` replays none.
        server_round: of the training, from 1; 0 where nobody named it.
        kept: of the client's latest replay.
    """
    if every is None:
        return False
    if kept is None or kept.again or not server_round:
        return True
    return not 0 < server_round - kept.server_round < every


@dataclass(frozen=True)
class SeenRound:
    """One captured training, and the arrays around it.

    Attributes:
        training: what was captured.
        arrays: that the server sent.
        answer: that the client sends; empty under a mask.
        num_examples: what the client says it used.
    """

    training: CapturedTraining
    arrays: ArrayRecord
    answer: ArrayRecord
    num_examples: int

    def facts(self, kept: Replayed | None, *, replays: bool) -> TrainingFacts | None:
        """How the client trained; ``None`` where nothing was captured."""
        try:
            known = kept.facts if kept else None
            return facts_of(self.training, self.num_examples, known, reads=replays)
        except Exception:  # nothing was captured: the replay's sentence says why
            return None

    def trained(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the training ended with, by the received names: it is compared under a mask."""
        live = name_live(received, [root.live for root in self.training.roots])
        return {name: tensor.detach() for name, (_, _, tensor) in live.items()}


def replay_now(
    seen: SeenRound,
    facts: TrainingFacts | None,
    kept: Replayed | None,
    server_round: int,
    context: Context,
    state: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
) -> ReplayResult:
    """Replay a training, and keep what came of it; ``state`` reads what was received and sent."""
    try:
        received, sent = state()
        check = check_replay(seen.training, received, sent or seen.trained(received))
    except Exception as error:
        check = ReplayCheck(None, problem=str(error) or type(error).__name__)
    sentence = check.sentence()
    if not seen.answer and check.residual is not None:
        sentence += f"; {MASKED}"
    varying = {*kept.varying, *kept.again, *_changed(facts, kept)} if kept else set()
    named = tuple(name for name in _NUMBERS if name in varying)
    Replayed(server_round, check.explains, sentence, facts, named).keep(context)
    return ReplayResult(check.residual, check.explains, sentence)


def look(
    looks: Glance,
    seen: SeenRound,
    facts: TrainingFacts | None,
    kept: Replayed | None,
    context: Context,
) -> ReplayResult:
    """What is said of a training that is not replayed; a change asks for a replay of the next."""
    if kept is None:  # no replay was asked for
        kept = Replayed(0, True, "", facts)
        kept.keep(context)
    if not kept.explains:
        sentence = f"not replayed since round {kept.server_round}, where {kept.sentence}"
        return ReplayResult(None, False, sentence, replayed=False)
    try:
        causes = _causes(looks, seen)
    except Exception as error:
        causes = (str(error) or type(error).__name__,)
    changed = _changed(facts, kept)
    again = (*causes, *(name for name in changed if name not in kept.varying))
    if again and kept.server_round:
        replace(kept, again=again).keep(context)
    if causes:
        sentence = f"not replayed in this round, and {'; '.join(causes)}"
        sentence += "; results are no evidence of safety"
        return ReplayResult(None, False, sentence, replayed=False)
    sentence = _unreplayed(facts, kept, changed, masked=not seen.answer)
    return ReplayResult(None, True, sentence, replayed=False)


def _unreplayed(
    facts: TrainingFacts | None, kept: Replayed, changed: tuple[str, ...], *, masked: bool
) -> str:
    """What was seen of a round that nothing speaks against, and no more."""
    if not kept.server_round:
        ended = f"; {MASKED}" if masked else " and ended with those that it sent"
        return (
            "not replayed in this round (replay_every=None); it began with the server's parameters"
            f"{ended}"
        )
    end = "not the end, which was masked" if masked else "end"
    looked = f"start, first step, settings told, {end}"
    if facts is None or kept.facts is None:
        looked = f"start, {end}"
    elif facts.repeated:
        looked += "; not the normalisation"
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


def _causes(looks: Glance, seen: SeenRound) -> tuple[str, ...]:
    if not seen.answer:  # under a mask
        return looks.causes(seen.training, lambda _: [])
    return looks.causes(seen.training, partial(differing, seen.answer))


def _changed(facts: TrainingFacts | None, kept: Replayed) -> tuple[str, ...]:
    """The settings in which a training differs from the one that was replayed."""
    if facts is None or kept.facts is None:
        return ()
    then = kept.facts
    names = [n for n in (*_NUMBERS, *_KINDS) if getattr(facts, n) != getattr(then, n)]
    # What follows the bracket are numbers of samples.
    if facts.unscheduled.partition("[")[0] != then.unscheduled.partition("[")[0]:
        names.append("schedule")
    return tuple(names)
