"""Record the work of a resumed run without writing an entry twice."""

from dataclasses import dataclass, field

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.lines import TextRecord
from flwr_leakage.tracking.run_data import RunData
from flwr_leakage.tracking.tracker import KeepsTexts, Tracker


@dataclass
class OnceTracker:
    """A tracker that passes on only those entries that the run does not hold yet.

    Entries are compared by round, client, sample, kind and name; events also by their text. If a
    process is killed while it records a round, the round can be recorded again: missing entries are
    added, and none is written twice.

    Attributes:
        tracker: the tracker that receives new entries; ``None`` until it is set. It is set after
            this object is made, as opening a tracker already writes a line to the run.
        seen: the keys of the entries that the run holds.
    """

    tracker: Tracker | None
    seen: set[tuple[object, ...]] = field(default_factory=set)

    @staticmethod
    def of(run: RunData) -> "OnceTracker":
        """Return a tracker that passes on only entries that the given run does not hold yet.

        Its attribute ``tracker`` has to be set before the first entry.
        """
        return OnceTracker(
            None,
            {
                *map(_number, run.records),
                *map(_event, run.events),
                *((i.server_round, i.client_id, i.sample, i.role) for i in run.images),
                *map(_text, run.texts),
            },
        )

    def log(self, record: LeakageRecord) -> None:
        """Pass a record on, unless the run holds it already."""
        if self._is_new(_number(record)):
            self._open().log(record)

    def event(self, event: RunEvent) -> None:
        """Pass an event on, unless the run holds it already."""
        if self._is_new(_event(event)):
            self._open().event(event)

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Pass an image on, unless the run holds it already."""
        if self._is_new((server_round, client_id, sample, role)):
            self._open().image(server_round, client_id, sample, role, pixels)

    def text(self, text: TextRecord) -> None:
        """Pass a text on to a tracker that takes texts, unless the run holds it already."""
        tracker = self._open()
        if isinstance(tracker, KeepsTexts) and self._is_new(_text(text)):
            tracker.text(text)

    def close(self) -> None:
        """Close the tracker that receives the entries, if it was set."""
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


def _text(text: TextRecord) -> tuple[object, ...]:
    return "text", text.server_round, text.client_id, text.sample, text.role


def _number(record: LeakageRecord) -> tuple[object, ...]:
    place = (record.server_round, record.client_id, record.sample)
    return (*place, record.kind, record.name)


def _event(event: RunEvent) -> tuple[object, ...]:
    return (event.server_round, event.client_id, event.level, event.message)
