"""What a client keeps for its owner, and what of it travels."""

import logging
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.flower.client_release import Release
from flwr_leakage.flower.client_session import Session
from flwr_leakage.flower.wire import RECORD_KEY, pack_note

REFUSED = "this client's own policy keeps its update of this round back"
"""All that a refusal tells the server."""

_LOG = logging.getLogger(__name__)


def sent_note(session: Session, done: Release, note: ClientNote) -> ClientNote:
    """What travels beside the update: the numbers that the owner shares, and nothing else."""
    audit = session.audit
    scores = done.measurements if audit.score_plan.send else ()
    attacked = done.attacked.shared(audit.share) if done.attacked else ()
    return replace(note, measurements=(*scores, *attacked))


def keep_own(session: Session, done: Release, note: ClientNote, context: Context) -> None:
    """Keep all that was measured and decided, in the client's state and in its owner's folder."""
    audit = session.audit
    attacked = done.attacked.shared("numbers") if done.attacked else ()
    remark = " ".join(filter(None, (note.remark, *said(done))))
    own = replace(note, measurements=(*done.measurements, *attacked), remark=remark)
    packed = pack_note(own, with_measurements=True)
    remember(context, session.server_round, packed, audit.score_plan.keep_rounds)
    if audit.folder is None:
        return
    folder = Path(audit.folder) / f"run-{context.run_id}-client-{session.client_id}"
    try:
        from flwr_leakage.audit.own_record import write_own_record

        write_own_record(
            folder, session.server_round, replace(note, measurements=done.measurements),
            done.update, done.attacked, said(done), done.refused, audit.self_attack,
        )  # fmt: skip
    except Exception:  # a full disk must not be what breaks a training
        _LOG.exception("flwr_leakage: the owner's record of this round could not be written")


def said(done: Release) -> tuple[str, ...]:
    """What the gate said, in sentences for the owner."""
    sentences = []
    for number, each in enumerate(done.tries):
        verdict = "passes" if each.judgement.passes else "does not pass"
        why = "; ".join(each.judgement.reasons)
        last = number == len(done.tries) - 1
        fate = "" if not last else " It was sent." if each.judgement.passes else " It was not sent."
        sentences.append(
            f"Gate: the update under {each.defense} {verdict}{f' ({why})' if why else ''}.{fate}"
        )
    return tuple(sentences)


def remember(
    context: Context, server_round: int, packed: ConfigRecord, keep_rounds: int | None
) -> None:
    """Keep the notes of the latest rounds, packed, in the client's own state."""
    kept = context.state.get(RECORD_KEY)
    history = kept if isinstance(kept, ConfigRecord) else ConfigRecord()
    history[f"round-{server_round}"] = packed["note"]
    if keep_rounds is not None:
        for name in sorted(history, key=lambda name: int(name.removeprefix("round-"))):
            if len(history) > keep_rounds:
                del history[name]
    context.state[RECORD_KEY] = history
