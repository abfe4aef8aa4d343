"""A live view in MLflow: the median of each quantity by round, and counts of events."""

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tracker import RoundMedians, checked_pixels


def open_client(tracking_uri: str) -> Any:
    """Open an ``MlflowClient``.

    Raises:
        ImportError: if MLflow is not installed, naming the extra that installs it.
    """
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ImportError(
            "MlflowTracker needs MLflow: pip install 'flwr-leakage[mlflow]'."
        ) from error
    return MlflowClient(tracking_uri=tracking_uri)


class MlflowTracker:
    """Sends the medians of a round when the next one begins.

    Args:
        folder: the run folder; its name is that of the run.
        tracking_uri: a server's address or a database such as ``sqlite:///FILE``; a database in
            ``folder`` if ``None``, which never leaves this machine.
        experiment: the experiment's name; made where it does not exist.
        upload_images: whether private images may go to the tracking server.
        client: an ``MlflowClient`` to use in place of a new one.
    """

    def __init__(
        self,
        folder: str | Path,
        tracking_uri: str | None = None,
        experiment: str = "flwr-leakage",
        upload_images: bool = False,
        client: Any | None = None,
    ) -> None:
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        uri = tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = open_client(uri) if client is None else client
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            # Artifacts of a local database would else go to the working folder.
            place = None if tracking_uri else (folder / "mlflow").as_uri()
            experiment_id = self._client.create_experiment(experiment, artifact_location=place)
        else:
            experiment_id = found.experiment_id
        run = self._client.create_run(experiment_id, run_name=folder.name)
        self._run_id = run.info.run_id
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
        name = f"{role}/round_{server_round}_client_{client_id}_sample_{sample}.png"
        self._client.log_image(self._run_id, content, artifact_file=name)

    def close(self) -> None:
        """Send the last round and finish the run."""
        self._send()
        self._client.set_terminated(self._run_id)

    def _enter(self, server_round: int) -> None:
        if server_round != self._server_round:
            self._send()
        self._server_round = server_round

    def _send(self) -> None:
        for name, value in {**self._medians.take(), **self._levels}.items():
            self._client.log_metric(self._run_id, name, float(value), step=self._server_round)
        self._levels.clear()
