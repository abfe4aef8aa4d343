"""Define the interface of trackers, which receive the numbers, events and images of a run."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.lines import TextRecord

ROLES = ("original", "reconstruction", "defended", "decoded", "blind_guess", "named")
"""The roles of images and texts. A further one is ``what_if_NAME``: the reconstruction from the
same update under another defense, NAME.

``named`` are tokens that are known to occur in a batch. ``defended`` is a sample as a defense
encoded it, and ``decoded`` is one decoded from the encodings of all rounds so far. ``blind_guess``
is the reconstruction made without any attack for all samples of a round; its client id and sample
index are −1.
"""

_WHAT_IF = re.compile(r"what_if_[a-z0-9_]{1,40}")


def check_role(role: str) -> None:
    """Refuse an unknown role of an image or text, as the role becomes part of a file's name.

    Raises:
        ValueError: the role is none of ``ROLES`` and not ``what_if_NAME``.
    """
    if role not in ROLES and not _WHAT_IF.fullmatch(role):
        raise ValueError(f"role must be one of {ROLES} or what_if_NAME, got {role!r}.")


@runtime_checkable
class Tracker(Protocol):
    """The interface of trackers: objects that store or show what a run measures.

    A tracker is passed the numbers, events and images of a run in the order in which they are made.
    """

    def log(self, record: LeakageRecord) -> None:
        """Store one record: a number, with its name, unit, round and client."""

    def event(self, event: RunEvent) -> None:
        """Store one event: a text, with its level, round and client."""

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Receive one image, (C, H, W) in [0, 1] with C of 1 or 3.

        The client's id and the sample's index are −1 for none. The role is the kind of image, such
        as ``original`` or ``reconstruction``.
        """

    def close(self) -> None:
        """Write all entries that are still buffered; the tracker must not be used afterwards."""


@runtime_checkable
class KeepsTexts(Protocol):
    """The interface of a tracker that also takes texts, which live views do not."""

    def text(self, text: TextRecord) -> None:
        """Store one text, as token ids."""


Entry = LeakageRecord | RunEvent | TextRecord | tuple[int, int, int, str]
"""An entry of a run. An image is given by its round, client id, sample index and role."""


class ForwardingTracker(ABC):
    """A base class of trackers that pass each record, event, image and text on to other trackers.

    A subclass defines to which trackers, in ``_pass_on``.
    """

    def log(self, record: LeakageRecord) -> None:
        """Pass a record on."""
        self._pass_on(record, lambda tracker: tracker.log(record))

    def event(self, event: RunEvent) -> None:
        """Pass an event on."""
        self._pass_on(event, lambda tracker: tracker.event(event))

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Pass an image, (C, H, W) in [0, 1], on."""
        place = server_round, client_id, sample, role
        self._pass_on(place, lambda tracker: tracker.image(*place, pixels))

    def text(self, text: TextRecord) -> None:
        """Pass a text on to trackers that take texts."""

        def hand(tracker: Tracker) -> None:
            if isinstance(tracker, KeepsTexts):
                tracker.text(text)

        self._pass_on(text, hand)

    @abstractmethod
    def _pass_on(self, entry: Entry, hand: Callable[[Tracker], None]) -> None:
        """Pass an entry on, by a call of ``hand`` with each tracker that receives it."""


@dataclass(frozen=True)
class CompositeTracker(ForwardingTracker):
    """A tracker that passes every record, event, image and text on to several trackers.

    If one of them raises an error, the others still receive the entry; the first error is raised
    afterwards.

    Attributes:
        trackers: the trackers, which receive each entry in this order.
    """

    trackers: Sequence[Tracker]

    def close(self) -> None:
        """Close each tracker."""
        self._each(lambda tracker: tracker.close())

    def _pass_on(self, entry: Entry, hand: Callable[[Tracker], None]) -> None:
        self._each(hand)

    def _each(self, action: Callable[[Tracker], None]) -> None:
        first_error: Exception | None = None
        for tracker in self.trackers:
            try:
                action(tracker)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def checked_pixels(pixels: Tensor, role: str) -> Tensor:
    """Return pixels (C, H, W) as finite float32 values in [0, 1] on the CPU; they are clamped, and
    NaN becomes 0.

    Raises:
        ValueError: the shape is not (1 or 3, H, W), or the role is unknown.
    """
    check_role(role)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3) or pixels.numel() == 0:
        raise ValueError(f"pixels must be (1 or 3, H, W), got {tuple(pixels.shape)}.")
    finite = torch.nan_to_num(pixels.detach().to("cpu", torch.float32), nan=0.0)
    return finite.clamp(0.0, 1.0)
