"""Attacks by name: each preset is a YAML file of parts."""

import importlib
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from flwr_leakage._conf import conf_dir
from flwr_leakage.attacks.base import Attack


def preset_names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in _folder().glob("*.yaml") if path.stem != "none")


def load_preset(name: str) -> Attack:
    """Build the attack that ``conf/attack/<name>.yaml`` describes.

    Raises:
        ValueError: there is no such preset.
    """
    path = _folder() / f"{name}.yaml"
    if name not in preset_names():
        raise ValueError(f"preset must be one of {preset_names()}, got {name!r}.")
    attack = _build(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    if not isinstance(attack, Attack):
        raise ValueError(f"preset {name!r} must describe an attack, got {type(attack).__name__}.")
    return attack


def _folder() -> Path:
    return conf_dir() / "attack"


def _build(node: Any) -> Any:
    """Instantiate nodes with a ``_target_`` from the inside out, as Hydra does."""
    if isinstance(node, list):
        return [_build(item) for item in node]
    if not isinstance(node, dict):
        return node
    arguments = {key: _build(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return arguments
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)
