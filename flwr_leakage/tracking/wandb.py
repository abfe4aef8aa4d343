"""Show a live view in Weights & Biases: the median of each quantity by round.

Images of a run are private training data, and this tracker sends to another company's server. So
images are sent only if ``upload_images`` is true.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_leakage.tracking.live import LiveTracker, imported


def _import_wandb() -> Any:
    return imported("wandb", "WandbTracker needs Weights & Biases", "wandb")


class WandbTracker(LiveTracker):
    """A live view in Weights & Biases, to which a round's medians are sent when the next one
    begins.

    Args:
        folder: the folder for the files of the ``wandb`` library.
        project: the name of the project.
        entity: the user or team; ``None`` for the default one.
        name: the name of the run; ``None`` for a random one.
        mode: ``online``, ``offline`` or ``disabled``.
        upload_images: whether private images may leave this machine.
        run: a ``wandb`` run to use; ``None`` for a new one.
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
        super().__init__(upload_images)
        if mode not in ("online", "offline", "disabled"):
            raise ValueError(f"mode must be 'online', 'offline' or 'disabled', got {mode!r}.")
        if run is None:
            run = _import_wandb().init(
                dir=str(folder), project=project, entity=entity, name=name, mode=mode
            )
        self._run = run
        # wandb's own step must never decrease, and a later attack may be about an earlier round. So
        # the round is an axis of its own.
        self._run.define_metric("*", step_metric="server_round")

    def _send(self, server_round: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "server_round": server_round})

    def _send_image(self, server_round: int, name: str, levels: np.ndarray) -> None:
        self._run.log({name: _import_wandb().Image(levels), "server_round": server_round})

    def _finish(self) -> None:
        self._run.finish()
