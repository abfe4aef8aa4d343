"""Write the record that a client keeps for its owner: a run folder of this client alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.records import LeakageRecord, RunEvent, Update
from flwr_leakage.schedules import UntoldSchedule
from flwr_leakage.tracking import JsonlTracker

if TYPE_CHECKING:
    from flwr_leakage.audit.large_clients import Probed
    from flwr_leakage.audit.self_attack import SelfAttack, SelfAttacked
else:  # a client that attacks nothing works without the packages that attacks need
    Probed = SelfAttack = SelfAttacked = Any


def write_own_record(
    folder: Path,
    server_round: int,
    note: ClientNote,
    update: Update,
    attacked: SelfAttacked | None,
    said: Iterable[str],
    refused: bool,
    attack: SelfAttack | None,
) -> None:
    """Append a round to a client's own run folder, which its owner alone can read.

    Args:
        folder: the folder of one run and client; it is made if it does not exist.
        server_round: the number of the round, from 1.
        note: the client's note, with all scores.
        update: the update that was sent, or the one that was withheld.
        attacked: the result of the client's attack on its own update; ``None`` if the round was not
            attacked.
        said: sentences on whether the update passed its owner's limits; the last is the decision.
        refused: whether the update was withheld.
        attack: the settings of the client's attack; ``None`` for no attack.
    """
    from flwr_leakage.audit.record import Recorder

    tracker = JsonlTracker(folder, resume=True)
    try:
        recorder = Recorder(tracker, folder.name)
        where = (server_round, note.client_id)
        recorder.note(server_round, note)
        unattacked = "the client did not attack itself"
        if attacked:
            answered = attacked.attempt.answers[0].batch is not None
            unattacked = "" if answered else attacked.problem
        untold = isinstance(update.schedule, UntoldSchedule)
        schedule = None if untold else update.schedule
        recorder.client(where, schedule, update.num_examples, unattacked)
        if attacked:
            recorder.probes(where, attacked.probes)
        if attacked and attack and attacked.outcome:
            recorder.attempt(server_round, attacked.attempt)
            (answer,) = attacked.attempt.answers
            recorder.outcome(where, answer, attack.threat, attacked.outcome)
        sentences = tuple(said)
        for sentence in sentences:
            level = recorder.warning if refused else recorder.information
            level(*where, sentence)
        if sentences:
            tracker.log(
                LeakageRecord(
                    folder.name, *where, -1, "client", "sent", float(not refused),
                    "update", note=sentences[-1],
                )
            )  # fmt: skip
    except Exception as error:
        tracker.event(RunEvent(folder.name, server_round, note.client_id, "error", str(error)))
        raise
    finally:
        tracker.close()


def write_own_probes(
    folder: Path, server_round: int, note: ClientNote, num_examples: int, probed: Iterable[Probed]
) -> None:
    """Append attacks on probes to a client's own run folder, which is made if it does not exist.

    A probe is the update of one step on a few of the round's samples. Probes are attacked where the
    round's own update cannot be, for a reason that the note's remark tells. ``num_examples`` is the
    number of samples of the round, and ``probed`` has a result for each probe.
    """
    from flwr_leakage.audit.record import Recorder

    tracker = JsonlTracker(folder, resume=True)
    try:
        recorder, where = Recorder(tracker, folder.name), (server_round, note.client_id)
        recorder.note(server_round, note)
        recorder.client(where, None, num_examples, note.remark)
        recorder.probes(where, probed)
    finally:
        tracker.close()
