"""Check overrides on the command line; for an unknown key or option, name those that exist."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.arguments import suggest, unknown_key
from flwr_leakage.simulation.config import ConfigError, parse_overrides

OPTIONAL = ("experiment",)
"""The config groups for which no option need be chosen."""

ELSEWHERE = {
    "experiment": "; the papers' experiments run from a clone of the project only: "
    "python simulations/run.py experiment=NAME",
}
"""For config groups with options outside of the package, the end of a message that says where these
options are."""


def spell_experiment(arguments: list[str]) -> list[str]:
    """Return the arguments with ``+experiment=NAME`` as ``experiment=NAME``, as Hydra needs it."""
    return [a.removeprefix("+") if a.startswith("+experiment=") else a for a in arguments]


def check_overrides(arguments: list[str], folder: Path | None = None) -> str:
    """Return a text on what is wrong with the overrides among the command line's arguments; empty
    if nothing is.

    Hydra names a mistyped key, but not the keys that exist. Keys that ``+`` adds or ``~`` removes
    are not checked here; they are checked in the composed config. ``folder`` holds ``config.yaml``
    and the config groups; ``None`` for the package's own.
    """
    folder = folder or conf_dir()
    plain = [text for text in _without_values_of_flags(arguments) if not text.startswith("-")]
    bare = [text for text in plain if "=" not in text and not text.startswith("~")]
    if bare:
        return (
            f"an override is group=option or key=value, got {bare[0]!r}"
            f"{_as_option(folder, bare[0])}; `flwr-leakage list` names the groups and their options"
        )
    texts = [text for text in plain if "=" in text]
    texts = [a for a in texts if not a.startswith(("hydra.", "hydra/", "+", "~"))]
    try:
        overrides = parse_overrides(texts)
    except ConfigError as error:
        return str(error)
    with hydra.initialize_config_dir(str(folder), version_base=None):
        groups = [o for o in overrides if (folder / o.key_or_group).is_dir()]
        if problem := next(filter(None, (_check_group(folder, each) for each in groups)), ""):
            return problem
        cfg = hydra.compose("config", [_first_choice(folder, override) for override in groups])
    keys = [override.key_or_group for override in overrides if override not in groups]
    return next(filter(None, (_check_key(cfg, key) for key in keys)), "")


_FLAGS_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
                     "--cfg", "-c", "--package", "-p", "--info", "-i")  # fmt: skip
"""Hydra's own flags that take the next argument as their value (for ``-i`` it may be missing)."""


def _without_values_of_flags(arguments: list[str]) -> list[str]:
    pairs = zip(["", *arguments], arguments, strict=False)
    return [text for before, text in pairs if before not in _FLAGS_WITH_VALUE]


def _as_option(folder: Path, text: str) -> str:
    """Return a question such as "did you mean …?" with each existing option ``group=text``; empty
    if there is none.

    ``text`` is an argument without ``=``, and ``folder`` holds the config groups.
    """
    groups = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [f"{group}={text}" for group in groups if text in _options(folder, group)]
    return f" (do you mean {' or '.join(found)}?)" if found else ""


def _options(folder: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (folder / group).glob("*.yaml"))


def _choices(folder: Path, override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(_options(folder, override.key_or_group))
    if override.is_sweep_override():
        return [str(choice) for choice in override.sweep_string_iterator()]
    return [str(value)]


def _first_choice(folder: Path, override: Override) -> str:
    choice = _choices(folder, override)[0]
    return f"{override.key_or_group}={'null' if choice == 'None' else choice}"


def _check_group(folder: Path, override: Override) -> str:
    group = override.key_or_group
    options = _options(folder, group)
    listing = f"options: {', '.join(options)}{ELSEWHERE.get(group, '')}"
    choices = _choices(folder, override)
    if not choices:
        return f"no {group} is meant by {override.input_line!r}; {listing}"
    for choice in choices:
        if choice not in options and not (choice == "None" and group in OPTIONAL):
            return f"there is no {group} {choice!r}{suggest(choice, options)}; {listing}"
    return ""


def _check_key(cfg: DictConfig, key: str) -> str:
    node: Any = cfg
    path: list[str] = []
    for part in key.split("."):
        # ``key in node`` is false for keys whose value is still missing (``???``), so that all keys
        # are listed.
        keys = [str(k) for k in node] if isinstance(node, DictConfig) else []
        if part not in keys:
            return unknown_key(".".join(path), part, [k for k in keys if k != "hydra"])
        path.append(part)
        node = OmegaConf.select(node, part, throw_on_missing=False) if part != "run_dir" else None
    return ""
