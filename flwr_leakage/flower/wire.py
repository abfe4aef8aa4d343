"""Read and write the note that a client puts beside its update, and find arrays in a reply that no
defense has changed.

The note is packed into a ``ConfigRecord``, which strategies and differential-privacy mods ignore.
"""

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flwr_leakage.audit.note import ClientNote

RECORD_KEY = "flwr-leakage"
"""The name of the record that holds a client's note, in a reply and in the client's state."""

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the records of one type in a message's content by name, in a tenth of the time of
    ``content.array_records`` and the like.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def pack_note(note: ClientNote) -> ConfigRecord:
    """Return a client's note as the record that is put beside its update.

    The note must already be reduced, by ``Sharing.travelling``, to the facts that may be sent.
    """
    return ConfigRecord({"client-id": note.client_id, "note": note.to_text()})


def unpack_note(record: ConfigRecord) -> ClientNote:
    """Return the client's note from the record beside its update.

    Raises:
        ValueError: the record has not the form that ``pack_note`` writes.
    """
    return ClientNote.from_text(record.get("note"))


def unseen(reply: Message, released: str = "") -> str:
    """Return a text on where a reply holds arrays that no defense and no gate has treated; empty if
    it holds none.

    A gate is the client's own limits, beyond which no update is sent. ``released`` is the name of
    the ``ArrayRecord`` that was defended and judged, if any. Arrays are also found outside of an
    ``ArrayRecord``: as bytes in a config, or as a list of numbers among the metrics.
    """
    arrays = [name for name in records_of(reply.content, ArrayRecord) if name != released]
    if arrays:
        return f"the reply holds arrays that were neither defended nor judged: {sorted(arrays)}"
    for name, record in reply.content.items():
        if not isinstance(record, MetricRecord | ConfigRecord):
            continue
        for entry, value in record.items():
            if isinstance(value, bytes | list):
                return (
                    f"the reply's {name!r} holds {type(value).__name__} under {entry!r}, which was "
                    f"neither defended nor judged; single numbers and texts may travel"
                )
    return ""
