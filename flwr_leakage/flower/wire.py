"""Pack the note that a client adds to its reply into a record, and read it on the server.

The record is a ``ConfigRecord``, which strategies and differential-privacy mods ignore.
"""

from flwr.app import ConfigRecord

from flwr_leakage.audit.note import ClientNote

RECORD_KEY = "flwr-leakage"
"""The name of the note's record in a reply, and in the client's own state."""


def pack_note(note: ClientNote) -> ConfigRecord:
    """Return a client's note as the record that is put beside its update.

    ``Sharing.travelling`` has reduced the note to the facts that may be sent.
    """
    return ConfigRecord({"client-id": note.client_id, "note": note.to_text()})


def unpack_note(record: ConfigRecord) -> ClientNote:
    """Return the client's note from the record beside its update.

    Raises:
        ValueError: the record is none that ``pack_note`` writes.
    """
    return ClientNote.from_text(record.get("note"))
