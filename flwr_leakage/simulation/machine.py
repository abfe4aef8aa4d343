"""Check that the machine has the folders and files that a run needs."""

from pathlib import Path

from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.tracking.jsonl import RECORDS_FILE, make_private_folder, write_private

_PROBE_BYTES = 4096
"""The number of bytes that are written to test whether a folder has room: a block of common file
systems."""


def check_machine(experiment: Experiment) -> None:
    """Make the run's folders, and load files now whose errors would otherwise occur only late in
    the run.

    Raises:
        ConfigError: a folder or file cannot be used. The message names the key.
    """
    settings = experiment.settings
    make_folder("run_dir", settings.run_dir)
    if (Path(settings.run_dir) / RECORDS_FILE).exists():
        raise ConfigError(
            f"run_dir must be a new folder, got {settings.run_dir}, which holds a run."
        )
    for key, folder in (
        ("server.attack_folder", settings.server.attack_folder),
        ("client.folder", settings.client.folder),
    ):
        if folder is not None:
            make_folder(key, folder)
    lpips = experiment.evaluator.lpips
    if lpips is not None and lpips.backbone is not None:
        from flwr_leakage.metrics import BackboneUnavailableError

        try:
            lpips.network()
        except BackboneUnavailableError as error:
            raise ConfigError(
                f"metric.lpips.backbone must be a file of {lpips.net}'s weights, or null, got "
                f"{lpips.backbone}: {error}"
            ) from error


def make_folder(key: str, name: str) -> None:
    """Make the folder ``name`` and write to it once, as it may be read-only, or have no room.

    ``key`` is the path of the folder's setting in the config, for the error.

    Raises:
        ConfigError: the folder cannot be made or written to. The message names the key and the
            reason.
    """
    expected = f"{key} must name a folder that can be written"
    if not name.strip():
        raise ConfigError(f"{expected}, got {name!r}.")
    folder = Path(name)
    probe = folder / ".probe"
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{expected}, got {name}, which is a file.")
        make_private_folder(folder)
        write_private(probe, b"0" * _PROBE_BYTES)
        probe.unlink()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{expected}, got {name}: {reason}.") from error
