"""A live view in TensorBoard: the median of each quantity by round, images, events."""

from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tracker import RoundMedians, checked_pixels


def open_writer(folder: Path) -> Any:
    """Open a ``SummaryWriter``.

    Raises:
        ImportError: if TensorBoard is not installed, naming the extra that installs it.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardTracker needs TensorBoard: pip install 'flwr-leakage[tensorboard]'."
        ) from error
    return SummaryWriter(log_dir=str(folder))


class TensorBoardTracker:
    """Writes the medians of a round when the next one begins, and every image and event.

    Args:
        folder: where the event files go.
        writer: a ``SummaryWriter`` to use in place of a new one.
    """

    def __init__(self, folder: str | Path, writer: Any | None = None) -> None:
        self._writer = open_writer(Path(folder)) if writer is None else writer
        self._medians = RoundMedians()
        self._server_round = 0

    def log(self, record: LeakageRecord) -> None:
        """Add one number to its round's median."""
        self._enter(record.server_round)
        self._medians.add(record)

    def event(self, event: RunEvent) -> None:
        """Write one event as text."""
        who = "server" if event.client_id < 0 else f"client {event.client_id}"
        self._writer.add_text(event.level, f"{who}: {event.message}", event.server_round)

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Write one image under ``role/client/sample``."""
        tag = f"{role}/client_{client_id}/sample_{sample}"
        self._writer.add_image(tag, checked_pixels(pixels, role), server_round)

    def close(self) -> None:
        """Write the last round and close the writer."""
        self._write_medians()
        self._writer.close()

    def _enter(self, server_round: int) -> None:
        if server_round != self._server_round:
            self._write_medians()
        self._server_round = server_round

    def _write_medians(self) -> None:
        for tag, value in self._medians.take().items():
            self._writer.add_scalar(tag, value, self._server_round)
