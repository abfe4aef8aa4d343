"""Pack the note that a client adds to its reply into a record, and read it on the server.

The record is a ``ConfigRecord``, which strategies and differential-privacy mods ignore.
"""

from flwr.app import ConfigRecord

from flwr_leakage.audit.note import ClientNote

RECORD_KEY = "flwr-leakage"
"""The record's name in a reply, and in the client's own state."""


def pack_note(note: ClientNote) -> ConfigRecord:
    """Return a client's note as a record of its reply.

    ``Sharing.travelling`` decides beforehand which facts the note may hold.
    """
    return ConfigRecord({"client-id": note.client_id, "note": note.to_text()})


def unpack_note(record: ConfigRecord) -> ClientNote:
    """Return the client's note that a record of its reply holds.

    Raises:
        ValueError: the record is none that ``pack_note`` writes.
    """
    return ClientNote.from_text(record.get("note"))
