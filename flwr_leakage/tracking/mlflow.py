"""Show a live view in MLflow: the median of each quantity by round, and counts of events."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flwr_leakage.tracking.live import LiveTracker, imported


class MlflowTracker(LiveTracker):
    """A live view in MLflow, to which the medians of a round are sent when the next round begins.

    Args:
        folder: the run folder, whose name becomes the name of the MLflow run.
        tracking_uri: the address of a server, or a database such as ``sqlite:///FILE``; ``None``
            for a database in ``folder``, which never leaves this machine.
        experiment: the name of the experiment, which is made if it does not exist.
        upload_images: whether private images may be sent to the tracking server.
        client: an ``MlflowClient`` to use; ``None`` for a new one.
    """

    def __init__(
        self,
        folder: str | Path,
        tracking_uri: str | None = None,
        experiment: str = "flwr-leakage",
        upload_images: bool = False,
        client: Any | None = None,
    ) -> None:
        super().__init__(upload_images)
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if client is None:
            mlflow = imported("mlflow.tracking", "MlflowTracker needs MLflow", "mlflow")
            uri = tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
            client = mlflow.MlflowClient(tracking_uri=uri)
        self._client = client
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            # Without a location, MLflow writes a local database's artifacts to the working folder.
            place = None if tracking_uri else (folder / "mlflow").as_uri()
            experiment_id = self._client.create_experiment(experiment, artifact_location=place)
        else:
            experiment_id = found.experiment_id
        run = self._client.create_run(experiment_id, run_name=folder.name)
        self._run_id = run.info.run_id

    def _send(self, server_round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run_id, name, float(value), step=server_round)

    def _send_image(self, server_round: int, name: str, levels: np.ndarray) -> None:
        role, client, sample = name.split("/")
        file = f"{role}/round_{server_round}_{client}_{sample}.png"
        self._client.log_image(self._run_id, levels, artifact_file=file)

    def _finish(self) -> None:
        self._client.set_terminated(self._run_id)
