"""Write ``run.json``: the configuration, seed, versions and commit of a run."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from flwr_leakage.tracking.jsonl import METADATA_FILE, make_private_folder, write_private
from flwr_leakage.tracking.lines import VERSION

PACKAGES = (
    "flwr-leakage",
    "flwr",
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "torchmetrics",
    "lpips",
    "hydra-core",
    "ray",
)


def write_metadata(
    folder: str | Path,
    config: Mapping[str, Any],
    seed: int,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``run.json`` atomically into a run folder.

    Its keys are those of ``extra``, ``version`` (that of the records' format), ``config``,
    ``seed``, ``versions`` (of packages), ``commit`` (``None`` outside of a git checkout), ``dirty``
    (whether the checkout had changes), ``start_time``, ``platform`` and ``command``.

    Args:
        folder: the run folder; made with mode 0700 if it does not exist.
        config: the complete, resolved configuration.
        seed: the seed of the run.
        extra: further entries, such as the names of the run, the attack and the defense.

    Returns:
        The path of ``run.json``.

    Raises:
        ValueError: ``extra`` has one of the other keys.
    """
    commit, dirty = project_commit()
    own = {
        "version": VERSION,
        "config": config,
        "seed": seed,
        "versions": installed_versions(),
        "commit": commit,
        "dirty": dirty,
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "command": shlex.join(without_secrets(sys.orig_argv)),
    }
    taken = sorted(own.keys() & (extra or {}).keys())
    if taken:
        raise ValueError(f"extra must not have the keys {sorted(own)}, got {taken}.")
    folder = Path(folder)
    make_private_folder(folder)
    path = folder / METADATA_FILE
    content = json.dumps(as_json({**(extra or {}), **own}), allow_nan=False, indent=2)
    write_private(path, content.encode() + b"\n")
    return path


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with ``…`` for the tokens by which Flower's processes
    authenticate.

    Example:
        >>> without_secrets(["flwr-serverapp", "--token", "6215d1", "--insecure", "--token=6215d1"])
        ['flwr-serverapp', '--token', '…', '--insecure', '--token=…']
    """
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        secret = equals and name.endswith("token")
        shown.append("…" if before.endswith("token") else f"{name}=…" if secret else argument)
    return shown


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that affect the numbers of a run."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def project_commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package runs from, and whether it has changes.

    Both are ``None`` for an installed package, whose source files git does not track.
    """
    source = Path(__file__).resolve()
    try:
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        commit = _git(source.parent, "rev-parse", "HEAD").strip()
        return commit, bool(_git(source.parent, "status", "--porcelain").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    # Without this option ``git status`` writes the index, and leaves it locked if the disk is full.
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=10
    ).stdout


def as_json(value: Any) -> Any:
    """Return a value converted to types of strict JSON.

    NaN and infinities become texts, and so does every object that JSON has no type for.
    """
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Sequence | set | frozenset):
        return [as_json(entry) for entry in value]
    return str(value)
