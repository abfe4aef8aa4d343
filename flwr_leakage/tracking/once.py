"""Track resumed work, without writing twice what a run already holds."""

from dataclasses import dataclass, field

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.run_data import RunData
from flwr_leakage.tracking.tracker import Tracker


@dataclass
class OnceTracker:
    """Pass on the entries that the run lacks, by round, client, sample, kind and name.

    It can be made before its tracker, whose opening is a line in the run's record.

    A process that was killed while it recorded leaves some of a round's numbers. When the same
    work is recorded again, the others are added, and none stands twice.

    Attributes:
        tracker: the tracker that receives new entries; ``None`` until it is open.
        seen: the entries that the run holds.
    """

    tracker: Tracker | None
    seen: set[tuple[object, ...]] = field(default_factory=set)

    @staticmethod
    def of(run: RunData) -> "OnceTracker":
        """Return a ``OnceTracker`` of a tracker that continues a run, with its entries."""
        return OnceTracker(
            None,
            {
                *map(_number, run.records),
                *map(_event, run.events),
                *((i.server_round, i.client_id, i.sample, i.role) for i in run.images),
            },
        )

    def log(self, record: LeakageRecord) -> None:
        """Log a number that the run lacks."""
        if self._is_new(_number(record)):
            self._open().log(record)

    def event(self, event: RunEvent) -> None:
        """Pass on an event that the run lacks."""
        if self._is_new(_event(event)):
            self._open().event(event)

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Pass on an image that the run lacks."""
        if self._is_new((server_round, client_id, sample, role)):
            self._open().image(server_round, client_id, sample, role, pixels)

    def close(self) -> None:
        """Close the tracker, where there is one."""
        if self.tracker is not None:
            self.tracker.close()

    def _open(self) -> Tracker:
        if self.tracker is None:
            raise ValueError("expected an open tracker, got None: set OnceTracker.tracker first.")
        return self.tracker

    def _is_new(self, key: tuple[object, ...]) -> bool:
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


def _number(record: LeakageRecord) -> tuple[object, ...]:
    place = (record.server_round, record.client_id, record.sample)
    return (*place, record.kind, record.name)


def _event(event: RunEvent) -> tuple[object, ...]:
    return (event.server_round, event.client_id, event.level, event.message)
