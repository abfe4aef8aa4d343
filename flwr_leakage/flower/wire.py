"""Pack the record that a client's mod adds to its reply, and read it on the server.

It is a ``ConfigRecord``, which strategies and differential-privacy mods ignore.
"""

from flwr.app import ConfigRecord

from flwr_leakage.audit.note import ClientNote

RECORD_KEY = "flwr-leakage"
"""The record's name in a reply, and in the client's own state."""


def pack_note(note: ClientNote) -> ConfigRecord:
    """Return the record that travels; ``Sharing.travelling`` decides what a note may hold."""
    return ConfigRecord({"client-id": note.client_id, "note": note.to_text()})


def unpack_note(record: ConfigRecord) -> ClientNote:
    """Read the record of a reply.

    Raises:
        ValueError: it is no record that ``pack_note`` writes.
    """
    return ClientNote.from_text(record.get("note"))
