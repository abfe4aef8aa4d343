"""Attack what a run kept, with the experiment that its ``run.json`` tells."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.audit.later import attack_kept
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.weights import last_buffers
from flwr_leakage.tracking import Tracker, read_run


def has_config(folder: Path) -> bool:
    """Whether a run folder tells the config that it was run by."""
    return isinstance(read_run(folder).metadata.get("config"), Mapping)


def attack_kept_of_run(folder: Path, workers: int, max_seconds: float | None) -> int:
    """Attack what a simulation kept; see ``attack_kept``.

    Args:
        folder: of the run.
        workers: processes that attack.
        max_seconds: CPU seconds for a target; ``None`` for the run's own.

    Raises:
        ConfigError: the run's config cannot be used here.
    """
    config: dict[str, Any] = dict(read_run(folder).metadata["config"])
    if not config.get("attack"):
        raise ConfigError("attack must not be none, as kept updates are to be attacked.")
    config["run_dir"] = str(folder)
    limit = config["server"]["attack_max_seconds"] if max_seconds is None else max_seconds
    # One process here: those of ``attack_kept`` are started around it.
    config["server"] = {
        **config["server"],
        "attack_later": True,
        "attack_workers": 1,
        "attack_folder": None,
        "attack_max_seconds": limit,
    }
    experiment = build(config)

    def audit_of(tracker: Tracker) -> ServerAudit:
        return experiment.server_audit(tracker, folder.name, ConsoleProgress())

    chunk = config["server"]["attack_chunk"]
    final = last_buffers(folder, experiment.network)
    return attack_kept(folder, audit_of, workers, chunk, final)
