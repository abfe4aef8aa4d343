"""A live view in Weights & Biases: the median of each quantity by round.

Images of a run are private training data, and this tracker sends what it is given to another
company's server: images go there only where ``upload_images`` says so.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tracker import RoundMedians, checked_pixels


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "WandbTracker needs Weights & Biases: pip install 'flwr-leakage[wandb]'."
        ) from error
    return wandb


class WandbTracker:
    """Sends the medians of a round when the next one begins.

    Args:
        folder: where the client keeps its files.
        project: the project's name.
        entity: the user or team, or ``None`` for the default one.
        name: the run's name, or ``None`` for a drawn one.
        mode: ``online``, ``offline`` or ``disabled``.
        upload_images: whether private images may leave this machine.
        run: a run to use in place of a new one.
    """

    def __init__(
        self,
        folder: str | Path,
        project: str = "flwr-leakage",
        entity: str | None = None,
        name: str | None = None,
        mode: str = "online",
        upload_images: bool = False,
        run: Any | None = None,
    ) -> None:
        if mode not in ("online", "offline", "disabled"):
            raise ValueError(f"mode must be 'online', 'offline' or 'disabled', got {mode!r}.")
        if run is None:
            run = _import_wandb().init(
                dir=str(folder), project=project, entity=entity, name=name, mode=mode
            )
        self._run = run
        # Rounds are no wandb steps: an attack may come later than the round that it is about.
        self._run.define_metric("*", step_metric="server_round")
        self._upload_images = upload_images
        self._medians = RoundMedians()
        self._levels: Counter[str] = Counter()
        self._server_round = 0

    def log(self, record: LeakageRecord) -> None:
        """Add one number to its round's median."""
        self._enter(record.server_round)
        self._medians.add(record)

    def event(self, event: RunEvent) -> None:
        """Count one event by its level; its text stays on this machine."""
        self._enter(event.server_round)
        self._levels[f"events/{event.level}"] += 1

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Send one image, where that is allowed."""
        checked = checked_pixels(pixels, role)
        if not self._upload_images:
            return
        content = (checked * 255).round().byte().permute(1, 2, 0).numpy()
        name = f"{role}/client_{client_id}/sample_{sample}"
        self._run.log({name: _import_wandb().Image(content), "server_round": server_round})

    def close(self) -> None:
        """Send the last round and finish the run."""
        self._send()
        self._run.finish()

    def _enter(self, server_round: int) -> None:
        if server_round != self._server_round:
            self._send()
        self._server_round = server_round

    def _send(self) -> None:
        numbers = {**self._medians.take(), **self._levels}
        self._levels.clear()
        if numbers:
            self._run.log({**numbers, "server_round": self._server_round})
