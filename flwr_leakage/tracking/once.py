"""Record the work of a resumed run without writing an entry twice."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flwr_leakage.records import RunEvent
from flwr_leakage.tracking.lines import TextRecord
from flwr_leakage.tracking.run_data import RunData
from flwr_leakage.tracking.tracker import Entry, ForwardingTracker, Tracker


@dataclass
class OnceTracker(ForwardingTracker):
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
        images = ((i.server_round, i.client_id, i.sample, i.role) for i in run.images)
        held: tuple[Entry, ...] = (*run.records, *run.events, *images, *run.texts)
        return OnceTracker(None, set(map(_key, held)))

    def close(self) -> None:
        """Close the tracker that receives the entries, if it was set."""
        if self.tracker is not None:
            self.tracker.close()

    def _pass_on(self, entry: Entry, hand: Callable[[Tracker], None]) -> None:
        if (key := _key(entry)) in self.seen:
            return
        if self.tracker is None:
            raise ValueError("expected an open tracker, got None: set OnceTracker.tracker first.")
        self.seen.add(key)
        hand(self.tracker)


def _key(entry: Entry) -> tuple[object, ...]:
    """Return the key of an entry, which differs between the entries of a run."""
    if isinstance(entry, tuple):
        return entry
    place = entry.server_round, entry.client_id
    if isinstance(entry, RunEvent):
        return (*place, entry.level, entry.message)
    if isinstance(entry, TextRecord):
        return ("text", *place, entry.sample, entry.role)
    return (*place, entry.sample, entry.kind, entry.name)
