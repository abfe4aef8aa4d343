"""Guard a tracker so that its errors never end the training, not even on a full disk."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tracker import Entry, ForwardingTracker, Tracker

_LOG = logging.getLogger(__name__)

LOST = "entries were lost"
"""Words by which readers of a run find the event that tells how many entries were lost."""


@dataclass
class GuardedTracker(ForwardingTracker):
    """A tracker that passes all entries of a run on to another tracker, and raises none of its
    errors.

    Entries are numbers, events, images and texts. An error is logged, and the lost entry is
    counted. Later entries are still passed on, as the disk may have room by then. After the first
    later entry that is recorded, an event tells the number of lost entries.

    Attributes:
        tracker: the tracker that is guarded.
        tell: a function that is given a sentence when the first entry is lost, and when the loss
            cannot be recorded or the tracker cannot be closed.
        lost: the number of entries lost since the last event that told of losses.
    """

    tracker: Tracker
    tell: Callable[[str], None] = _LOG.warning
    lost: int = field(default=0, init=False)
    _last: tuple[str, int] = field(default=("", 0), init=False)

    def close(self) -> None:
        """Record how many entries were lost, and close the guarded tracker; raise no error."""
        if self.lost:
            self._say_what_was_lost()
        try:
            self.tracker.close()
        except Exception as error:
            self.tell(f"{type(self.tracker).__name__} could not be closed: {_named(error)}")

    def _pass_on(self, entry: Entry, hand: Callable[[Tracker], None]) -> None:
        if isinstance(entry, LeakageRecord | RunEvent):
            self._last = (entry.run, entry.server_round)
        try:
            hand(self.tracker)
        except Exception as error:
            if not self.lost:
                name = type(self.tracker).__name__
                self.tell(f"The training goes on, but {name} cannot record it: {_named(error)}")
            self.lost += 1
        else:
            if self.lost:
                self._say_what_was_lost()

    def _say_what_was_lost(self) -> None:
        name = type(self.tracker).__name__
        message = f"{self.lost} {LOST}, as {name} could not record them."
        try:
            self.tracker.event(RunEvent(*self._last, -1, "error", message))
        except Exception:
            self.tell(message)
        else:
            self.lost = 0


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
