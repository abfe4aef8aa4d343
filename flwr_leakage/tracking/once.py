"""A tracker for work that is taken up again: what a run holds already is not written twice."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.run_data import read_run
from flwr_leakage.tracking.tracker import Tracker


@dataclass
class OnceTracker:
    """Passes on what is not there yet, by round, client, sample, kind and name.

    A process that was killed while it recorded leaves some of a round's numbers. When the same
    work is recorded again, the others are added, and none stands twice.

    Attributes:
        tracker: where it goes.
        seen: what is there.
    """

    tracker: Tracker
    seen: set[tuple[object, ...]] = field(default_factory=set)

    @staticmethod
    def of(tracker: Tracker, folder: str | Path) -> "OnceTracker":
        """Around a tracker of a run folder, with what the folder holds."""
        run = read_run(folder)
        return OnceTracker(
            tracker,
            {
                *map(_number, run.records),
                *map(_event, run.events),
                *((i.server_round, i.client_id, i.sample, i.role) for i in run.images),
            },
        )

    def log(self, record: LeakageRecord) -> None:
        """Log a number that is not there."""
        if self._is_new(_number(record)):
            self.tracker.log(record)

    def event(self, event: RunEvent) -> None:
        """Pass an event on that is not there."""
        if self._is_new(_event(event)):
            self.tracker.event(event)

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Pass an image on that is not there."""
        if self._is_new((server_round, client_id, sample, role)):
            self.tracker.image(server_round, client_id, sample, role, pixels)

    def close(self) -> None:
        """Close the tracker."""
        self.tracker.close()

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
