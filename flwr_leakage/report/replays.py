"""Report whether attacked updates are those that clients trained, by repeating their training."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from flwr_leakage.capture import TOLERANCE
from flwr_leakage.measurements import NOT_CHECKED
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.attempts import Place, where
from flwr_leakage.report.index import Index, count, number, several
from flwr_leakage.report.samples import IMAGE, Sample

_CHECK = "replay_residual"
_PASSED = "replay_passed"
"""The name of the record of a repeated training that gave the update, without the relative distance
of the two, which the client does not share.
"""


_SKIPPED = "not_replayed"
"""The name of the record of a round in which a client's training was not repeated, and nothing
contradicted the latest repetition.
"""


_REFUTED = "not explain"
_EMPTY_WORDS = ("; results are no evidence of safety", "the training was not replayed: ")


FAILED = "Replay check failed"
"""The first words of the sentence on updates that a repetition of the client's training does not
give.
"""


@dataclass(frozen=True)
class Replays:
    """The outcomes of replays, in which clients repeat their training, by (round, client) of the
    update.

    Attributes:
        same: updates that are reproduced, with the relative distance of the repeated update, or
            ``None`` if the client does not share it.
        other: updates that are not reproduced, with the reason.
        undone: updates whose training was not repeated, with the reason.
        between: the updates of ``undone`` for which nothing that the client compared differs from
            its latest repeated round.
    """

    same: Mapping[Place, float | None]
    other: Mapping[Place, str]
    undone: Mapping[Place, str]
    between: Set[Place] = frozenset()


def replays(index: Index, events: Sequence[RunEvent] = ()) -> Replays:
    """Return which updates a repetition (a replay) of the client's training reproduces. Some of
    ``events`` say why a client could not repeat its training.
    """
    same: dict[Place, float | None] = {}
    other: dict[Place, str] = {}
    undone: dict[Place, str] = {}
    skipped = index.series("check", _SKIPPED)
    for (server_round, client, _), record in index.series("check", _CHECK).items():
        place = (server_round, client)
        if _REFUTED in record.note or (record.value is not None and record.value > TOLERANCE):
            other[place] = _reason(record)
        elif record.value is None:
            undone[place] = _reason(record)
        else:
            same[place] = record.value
    for server_round, client, _ in index.series("check", _PASSED):
        same[server_round, client] = None
    for (server_round, client, _), record in skipped.items():
        undone[server_round, client] = _reason(record)
    for event in events:
        _, refused, reason = event.message.partition(NOT_CHECKED)
        if refused:
            undone[event.server_round, event.client_id] = reason.rstrip(".")
    between = {key[:2] for key in skipped} - same.keys() - other.keys()
    return Replays(same, other, undone, between)


def _reason(record: LeakageRecord) -> str:
    text = record.note
    for words in _EMPTY_WORDS:
        text = text.replace(words, "")
    return text or "no reason was recorded"


def replay_of_client(found: Replays, client_id: int) -> str:
    """Return words for the rounds in which repeating a client's training did, and did not, give its
    update.
    """
    same = {place: off for place, off in found.same.items() if place[1] == client_id}
    parts = []
    for told, word in ((found.other, "no"), (found.undone, "not checked")):
        places = sorted(place for place in told if place[1] == client_id)
        if places:
            rounds = several([server_round for server_round, _ in places], "round")
            parts.append(f"{word}, {rounds}: {told[places[-1]]}")
    if same:
        rounds = several([server_round for server_round, _ in same], "round")
        off = _most(same.values())
        parts.append(f"yes, {rounds}" + ("" if off is None else f" ({_off(off)})"))
    return "; ".join(parts) or "not checked"


def _most(residuals: Iterable[float | None]) -> float | None:
    """Return the largest of the relative distances between updates and their repetitions; ``None``
    if a client does not share its own.
    """
    known = list(residuals)
    return None if None in known else max(value for value in known if value is not None)


def _off(residual: float) -> str:
    return "off by " + number(residual, 1).replace(" ", "\u00a0") if residual else "equal"


def replay_told(
    found: Replays, attacked: Collection[Place], defended: bool = False, sample: Sample = IMAGE
) -> tuple[str, ...]:
    """Return sentences on whether each attacked update is the one that its client trained.

    ``found`` holds the outcomes of repeating the training. ``attacked`` holds (round, client);
    client −1 stands for the mean of a round's updates, and so for all updates of the round.
    ``defended`` tells whether a defense changed updates after training. ``sample`` has the nouns
    for samples.
    """
    if not attacked:
        return ()
    places, same, other, left = _sorted_out(found, attacked)
    told = []
    if other:
        told.append(
            f"{FAILED} for {where(other)}: training again from the client’s own {sample.many} "
            f"gives another update than the one that was attacked. Results of it are no evidence "
            f"of safety (see Clients and classes)."
        )
    if same:
        off = _most(found.same[place] for place in same)
        whole = "each of the " * (len(same) > 1) or "the "
        whole += count(len(same), "attacked update").removeprefix("1 ")
        one, whose = "is", "its client’s"
        if other or left:
            whole = f"{len(same)} of {count(len(places), 'attacked update')}"
            one, whose = (one, whose) if len(same) == 1 else ("are", "their clients’")
        how = f"at most {TOLERANCE:g} of the update’s size; it shares no more"
        if off is not None:
            how = "none, to the last digit"
        if off:
            how = f"at most {number(off, 1)} of the update’s size (Euclidean norm)"
        told.append(
            f"Replay check passed: {whole}, {_as(defended, one)}, {one} what {whose} training "
            f"gives. The client itself ran its training again from its own {sample.many}, and "
            f"reported the difference to the server (in a simulation all on one machine): {how}. "
            f"More than {TOLERANCE:g} would have failed. This is about the attacked updates only; "
            f"the table of clients has every replayed round."
        )
    between = left & found.between
    left -= between
    if between:
        told.append(
            f"Replay check not repeated for {where(between)}: the client compared start, settings, "
            f"steps and end with its latest replay, and found no difference."
        )
    if left or not places:
        whom = f" for {where(left)}" if left and (same or other or between) else ""
        told.append(
            f"Replay check not done{whom}: nothing shows that what was attacked is what the "
            f"client trained. If it is not, that an attack fails is no evidence of safety."
        )
    return tuple(told)


def _as(defended: bool, verb: str) -> str:
    """Return the clause that names the updates with which a repeated training is compared, such as
    ``as it was sent``, or ``before its defense`` if the client defended them. ``verb`` is ``are``
    for several updates, else ``is``.
    """
    if verb == "are":
        return "before their defense" if defended else "as they were sent"
    return "before its defense" if defended else "as it was sent"


def _sorted_out(
    found: Replays, attacked: Collection[Place]
) -> tuple[set[Place], set[Place], set[Place], set[Place]]:
    """Return four sets of attacked updates (round, client), by the outcome of repeating the
    training.

    The sets are: all updates; those that are reproduced; those that are not; and those whose
    training was not repeated. In ``attacked``, client −1 stands for all updates of a round.
    """
    summed = {server_round for server_round, client in attacked if client < 0}
    places = {place for place in attacked if place[1] >= 0}
    places |= {
        place for told in (found.same, found.other, found.undone) for place in told
        if place[0] in summed
    }  # fmt: skip
    same, other = places & found.same.keys(), places & found.other.keys()
    return places, same, other, places - same - other
