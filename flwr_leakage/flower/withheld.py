"""Find arrays in a reply that a client's defense or gate has not seen."""

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from flwr_leakage.flower.contents import records_of


def unseen(reply: Message, released: str = "") -> str:
    """Return in words why a reply holds arrays that no defense and no gate has seen; else empty.

    ``released`` names the ``ArrayRecord`` that was defended and judged, if any. Arrays are also
    found outside of an ``ArrayRecord``: as bytes in a config, or as a list of numbers among the
    metrics.
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
