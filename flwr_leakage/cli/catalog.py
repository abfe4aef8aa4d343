"""List the options of each config group, with the description in each option's YAML file."""

import itertools
from pathlib import Path

from flwr_leakage._conf import conf_dir


def groups() -> list[str]:
    """Return the sorted names of all config groups, such as ``attack``."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def entries(group: str) -> dict[str, str]:
    """Return the options of a config group, sorted by name, with a description of each.

    Raises:
        ValueError: there is no such group.
    """
    if group not in groups():
        raise ValueError(f"group must be one of {groups()}, got {group!r}.")
    return {path.stem: _line(path) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def _line(path: Path) -> str:
    """Return the comment at the top of a YAML file as one line.

    If no comment is at the top, the result is the first one behind a value; empty if there is none.
    """
    lines = path.read_text().splitlines()
    if lines and lines[0].startswith("# @package"):
        del lines[0]
    above = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    within = (line.partition(" # ")[2] for line in lines if " # " in line)
    return " ".join(line.lstrip("# ") for line in above) or next(within, "").strip()
