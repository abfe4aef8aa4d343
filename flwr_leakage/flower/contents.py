"""The records of a kind in a message."""

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """As ``content.array_records`` and its like, whose checked views take ten times as long."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}
