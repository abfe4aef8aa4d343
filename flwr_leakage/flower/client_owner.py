"""Keep a client's record for its owner, and choose which of its facts travel to the server."""

import logging
from dataclasses import replace
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.common.constant import ErrorCode

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.sharing import Sharing
from flwr_leakage.flower.client_release import Release, carry_on
from flwr_leakage.flower.client_session import Session
from flwr_leakage.flower.wire import RECORD_KEY

REFUSED = "this client's own policy keeps its update of this round back"
"""The error that the server gets if an update exceeds the client's own limits (its gate). The text
does not say which limit."""

FAILED = (
    "this client's audit could not be completed, and a defense or a gate lets nothing pass without "
    "it; the client's own log says why"
)
"""The error that the server gets if a client's audit failed, unless the client's owner shares the
reasons."""

_LOG = logging.getLogger(__name__)


def refuse(message: Message, reason: str) -> Message:
    """Return an error as the reply to ``message``. The server reads ``reason``."""
    return Message(
        Error(ErrorCode.MOD_FAILED_PRECONDITION, f"flwr_leakage: {reason}"), reply_to=message
    )


def withhold(message: Message, reason: object, sharing: Sharing) -> Message:
    """Return an error reply with a fixed text, and write the true reason into the client's log.

    The reason may reveal paths, labels and numbers of samples. Only if the client's owner shares
    reasons does the server get it in place of the fixed text.
    """
    _LOG.warning("flwr_leakage: the update is kept back: %s", reason)
    return refuse(message, str(reason) if sharing.reasons else FAILED)


def sent_note(session: Session, done: Release, note: ClientNote, remark: str) -> ClientNote:
    """Return the note that travels to the server beside the update.

    Of the fields of ``note``, it has those that the client's owner shares, and fixed categories in
    place of the others. ``remark`` replaces the note's own remark.
    """
    audit = session.audit
    scores = done.measurements if audit.score_plan.send else ()
    attacked = done.attacked.shared(audit.sharing) if done.attacked else ()
    note = replace(note, measurements=(*scores, *attacked))
    return audit.sharing.travelling(note, released_as_trained=not audit.may_defend, remark=remark)


def keep_own(session: Session, done: Release, note: ClientNote) -> None:
    """Keep a round's measurements and decisions in the client's state and in its owner's folder.

    ``note`` holds all facts that the client knows. With error feedback, the client's state also
    keeps the remainder: the part of the update that the defense left out, to be added to the next
    update. The state does not travel.
    """
    carry_on(session, done)
    audit, context = session.audit, session.context
    attacked = done.attacked.shared(Sharing.of("numbers")) if done.attacked else ()
    remark = " ".join(filter(None, (note.remark, *said(done))))
    own = replace(note, measurements=(*done.measurements, *attacked), remark=remark)
    remember(context, session.server_round, own, audit.score_plan.keep_rounds)
    if audit.folder is None:
        return
    folder = own_folder(audit.folder, context, session.client_id)
    try:
        from flwr_leakage.audit.own_record import write_own_record

        write_own_record(
            folder, session.server_round, replace(note, measurements=done.measurements),
            done.update, done.attacked, said(done), done.refused, audit.self_attack,
        )  # fmt: skip
    except Exception:  # an error of the record, such as a full disk, must not end the training
        _LOG.exception("flwr_leakage: the owner's record of this round could not be written")


def own_folder(folder: str, context: Context, client_id: int) -> Path:
    """Return the folder for the record of one run and client, within its owner's ``folder``."""
    return Path(folder) / f"run-{context.run_id}-client-{client_id}"


def said(done: Release) -> tuple[str, ...]:
    """Return sentences for the client's owner on whether the update keeps the owner's limits.

    There is a sentence for each defense under which the update was compared with the limits.
    """
    sentences = []
    for number, each in enumerate(done.tries):
        verdict = "passes" if each.judgement.passes else "does not pass"
        why = "; ".join(each.judgement.reasons)
        last = number == len(done.tries) - 1
        fate = "" if not last else " It was sent." if each.judgement.passes else " It was not sent."
        sentences.append(
            f"Gate: the update {each.defense} {verdict}{f' ({why})' if why else ''}.{fate}"
        )
    return tuple(sentences)


def remember(
    context: Context, server_round: int, note: ClientNote, keep_rounds: int | None
) -> None:
    """Keep the client's own record of a round, ``note``, in its state, which never leaves the
    client.

    The latest ``keep_rounds`` rounds stay; ``None`` keeps all.
    """
    kept = context.state.get(RECORD_KEY)
    history = kept if isinstance(kept, ConfigRecord) else ConfigRecord()
    history[f"round-{server_round}"] = note.to_text()
    if keep_rounds is not None:
        for name in sorted(history, key=lambda name: int(name.removeprefix("round-"))):
            if len(history) > keep_rounds:
                del history[name]
    context.state[RECORD_KEY] = history
