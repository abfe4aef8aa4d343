"""Compose a run's config by Hydra, and turn it into plain containers for other processes."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from flwr_leakage._conf import conf_dir

Config = dict[str, Any]


class ConfigError(ValueError):
    """The error for a config that cannot be run; its message names the wrong key."""


def compose(overrides: list[str], run_dir: str) -> Config:
    """Return the config that Hydra composes without ``@hydra.main``, as apps of ``flwr run`` do.

    ``overrides`` are Hydra overrides of the packaged config; ``run_dir`` is the run folder.
    """
    # If ``@hydra.main`` is running in this process, its global state is restored afterwards.
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
            cfg = hydra.compose(
                "config", [*overrides, f"run_dir={json.dumps(run_dir)}"], return_hydra_config=True
            )
    finally:
        GlobalHydra.instance().hydra = running
    choices = cfg.hydra.runtime.choices
    with open_dict(cfg):
        del cfg["hydra"]
    return to_config(cfg, choices)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Return the override objects that Hydra parses from their texts.

    Raises:
        ConfigError: a text is no valid override.
    """
    try:
        return OverridesParser.create().parse_overrides(list(texts))
    except HydraException as error:
        raise ConfigError(str(error)) from error


def to_config(cfg: DictConfig, choices: Mapping[str, Any]) -> Config:
    """Return a composed config as plain dictionaries and lists, with all interpolations resolved.

    ``cfg`` must not have Hydra's own section. The result has a key ``choices`` with the chosen
    option of each config group.

    Raises:
        ConfigError: a key without a default was not given, or the config has a key ``choices``.
    """
    if "choices" in cfg:
        raise ConfigError("there is no key 'choices' at the top level: groups are chosen by name.")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} must be given: {missing[0]}=VALUE, got none.")
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    own = {key: str(value) for key, value in choices.items() if "/" not in key}
    return {**{str(key): value for key, value in config.items()}, "choices": own}


def _scores() -> list[str]:
    """Return those options of the config group ``score`` that consist of a single score and are
    named after its class.
    """
    found = []
    for path in sorted((conf_dir() / "score").glob("*.yaml")):
        classes = re.findall(r"_target_: \S+\.(\w+)", path.read_text())
        if [name.lower() for name in classes] == [path.stem.replace("_", "")]:
            found.append(path.stem)
    return found


# The option ``score=all`` includes ``every``, so that a new score need not be added to a list.
ConfigStore.instance().store(group="score", name="every", node={"defaults": _scores()})
