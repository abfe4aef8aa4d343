"""Show a live view in TensorBoard: the median of each quantity by round, images, events."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_leakage.records import RunEvent
from flwr_leakage.tracking.live import LiveTracker, imported


class TensorBoardTracker(LiveTracker):
    """A live view in TensorBoard, which shows each round's medians and every image and event.

    The medians of a round are written when the next round begins.

    Args:
        folder: the folder for the event files.
        writer: a ``SummaryWriter`` to use; ``None`` for a new one in ``folder``.
    """

    def __init__(self, folder: str | Path, writer: Any | None = None) -> None:
        super().__init__(upload_images=True)  # the files stay in a folder of this machine
        if writer is None:
            what = "TensorBoardTracker needs TensorBoard"
            tensorboard = imported("torch.utils.tensorboard", what, "tensorboard")
            writer = tensorboard.SummaryWriter(log_dir=str(folder))
        self._writer = writer

    def event(self, event: RunEvent) -> None:
        """Write the text of one event."""
        who = "server" if event.client_id < 0 else f"client {event.client_id}"
        self._writer.add_text(event.level, f"{who}: {event.message}", event.server_round)

    def _send(self, server_round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, server_round)

    def _send_image(self, server_round: int, name: str, levels: np.ndarray) -> None:
        self._writer.add_image(name, levels, server_round, dataformats="HWC")

    def _finish(self) -> None:
        self._writer.close()
