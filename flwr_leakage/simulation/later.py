"""Attack the observations that a run stored for later, with the experiment that its ``run.json``
describes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.audit.later import KeptRun, attack_kept
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.foreign import FOLDER_GROUPS, check_targets, paths_outside
from flwr_leakage.simulation.settings import Sections, TopLevel
from flwr_leakage.simulation.weights import last_buffers
from flwr_leakage.tracking import Tracker, read_run

FORMER = ("device", "lab", "paper", "size", "sizes")
"""Keys at the top of configs of earlier versions of this package. Audits never read them, and they
are dropped."""

NEWER = {
    "attack_cpus": 1.0, "attack_gpus": 0.0, "attack_retries": 3, "kept_policy": "oldest",
    "what_if_max_seconds": None,
}  # fmt: skip
"""The keys of the section ``server`` that configs of earlier versions of this package lack, with
the values that are filled in."""

_INLINE = {"_target_": "flwr_leakage.flower.run_inline", "_partial_": True}


def has_config(folder: Path) -> bool:
    """Return whether a run folder holds the config of its run."""
    return isinstance(read_run(folder).metadata.get("config"), Mapping)


def received_config(folder: Path, allowed: Sequence[Path] = ()) -> Config:
    """Return the config of an untrusted run folder, reduced to the sections that attacks need.

    Trackers and engines are left out, and so are files from which the run started or which it wrote
    outside of its folder. Nothing is downloaded. ``allowed`` are folders and files outside of the
    run folder that the config may read, such as a data set.

    Raises:
        ConfigError: the config lacks a section, or names a class that the packaged config does not
            name, or a path outside of the folder.
    """
    config: Config = dict(read_run(folder).metadata["config"])
    for name in (
        "membership",
        "large_clients",
    ):  # these sections took effect during the run, and configs of older runs lack them
        config[name] = {}
    sections = [field.name for kind in (TopLevel, Sections) for field in fields(kind)]
    if missing := sorted({*sections, "choices"} - config.keys()):
        raise ConfigError(f"the config of {folder} must be a whole one, got none of {missing}.")
    for name in ("client", "server", "model", "dataset"):
        if not isinstance(config[name], Mapping):
            raise ConfigError(f"{name} must be a section, got {config[name]!r}.")
    for key in FORMER:
        config.pop(key, None)
    config |= {
        **{key: {} for key in ("tracker", "engine")},
        "run_dir": str(folder),
        "client": {**config["client"], "folder": None},
        "model": {**config["model"], "weights": None},
    }
    if "download" in config["dataset"]:
        config["dataset"] = {**config["dataset"], "download": False}
    check_targets(config, FOLDER_GROUPS)
    for key, path in paths_outside(config, folder, allowed):
        raise ConfigError(
            f"{key} must lie inside of the run folder, got {path!r}. Where you know what lies "
            f"there, allow it: --allow {path}"
        )
    return {**config, "engine": _INLINE}


def attack_kept_of_run(
    folder: Path, workers: int | RayTasks, max_seconds: float | None, allowed: Sequence[Path] = ()
) -> int:
    """Attack the observations that a simulation stored for later; return the number of attacked
    rounds.

    ``workers`` is the number of attacking processes, or the resources of a task on a Ray cluster;
    ``max_seconds`` and ``allowed`` are those of :func:`kept_run`: the CPU seconds for each update,
    and what the run's config may read outside of ``folder``.
    """
    return attack_kept(kept_run(folder, max_seconds, allowed), workers)


def kept_run(folder: Path, max_seconds: float | None, allowed: Sequence[Path] = ()) -> KeptRun:
    """Return the observations that a simulation stored for later, with the attack of its own
    config.

    ``max_seconds`` are the CPU seconds that an attack may take for each target (an update or a mean
    update), ``None`` for the run's own limit; ``allowed`` are folders and files outside of the run
    folder that its config may read.

    Raises:
        ConfigError: the run's config has no attack, or cannot be used; see :func:`received_config`.
    """
    config: dict[str, Any] = received_config(folder, allowed)
    if not config["attack"]:
        raise ConfigError("attack must not be none, as kept updates are to be attacked.")
    given = config["server"].get("attack_max_seconds")
    # The experiment must not start processes for attacks, as ``attack_kept`` starts them itself.
    config["server"] = {
        **NEWER,
        **config["server"],
        "attack_later": True,
        "attack_workers": 1,
        "attack_folder": None,
        "attack_max_seconds": given if max_seconds is None else max_seconds,
    }
    experiment = build(config)

    def audit_of(tracker: Tracker) -> ServerAudit:
        return experiment.server_audit(tracker, folder.name, ConsoleProgress())

    server = experiment.settings.server
    ray = RayTasks(server.attack_cpus, server.attack_gpus, server.attack_retries)
    final = last_buffers(folder, experiment.network)
    return KeptRun(folder, audit_of, server.attack_chunk, final, ray)
