"""Define the base class of live views, which show medians by round, counts of events and images."""

import importlib
import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tracker import checked_pixels


def imported(module: str, what: str, extra: str) -> Any:
    """Import and return a module that a live view needs.

    Raises:
        ImportError: the module is not installed. The message holds ``what``, a clause such as
            ``MlflowTracker needs MLflow``, and ``extra``, this package's extra that installs the
            module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'flwr-leakage[{extra}]'.") from error


class LiveTracker(ABC):
    """A tracker that sends each round's medians and numbers of events when the next round begins.

    A median is over all numbers of the same kind and name. A subclass implements how numbers and
    images are sent, and how the view is closed.

    Args:
        upload_images: whether private images may be sent.
    """

    def __init__(self, upload_images: bool) -> None:
        self._upload_images = upload_images
        self._values: dict[str, list[float]] = {}
        self._levels: Counter[str] = Counter()
        self._server_round = 0

    def log(self, record: LeakageRecord) -> None:
        """Keep a record's number for the median of its kind and name in the round, sent as
        ``KIND/NAME``.

        A missing, NaN or infinite number is left out.
        """
        self._enter(record.server_round)
        if record.value is not None and math.isfinite(record.value):
            self._values.setdefault(f"{record.kind}/{record.name}", []).append(record.value)

    def event(self, event: RunEvent) -> None:
        """Count one event by its round and level; the event's text is not sent."""
        self._enter(event.server_round)
        self._levels[f"events/{event.level}"] += 1

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Send one image, (C, H, W) in [0, 1] with C of 1 or 3, if images may be sent."""
        levels = (checked_pixels(pixels, role) * 255).round().byte().permute(1, 2, 0).numpy()
        if self._upload_images:
            self._send_image(server_round, f"{role}/client_{client_id}/sample_{sample}", levels)

    def close(self) -> None:
        """Send the numbers of the last round and close the view."""
        self._send_round()
        self._finish()

    def _enter(self, server_round: int) -> None:
        if server_round != self._server_round:
            self._send_round()
        self._server_round = server_round

    def _send_round(self) -> None:
        medians = {name: statistics.median(values) for name, values in self._values.items()}
        numbers = {**medians, **self._levels}
        self._values.clear()
        self._levels.clear()
        if numbers:
            self._send(self._server_round, numbers)

    @abstractmethod
    def _send(self, server_round: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one round, which are given by the names of their quantities."""

    @abstractmethod
    def _send_image(self, server_round: int, name: str, levels: np.ndarray) -> None:
        """Send an image, (H, W, C) levels from 0 to 255, named ``ROLE/client_I/sample_J``."""

    @abstractmethod
    def _finish(self) -> None:
        """Close the view."""
