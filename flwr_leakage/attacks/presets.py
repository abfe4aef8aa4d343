"""Load attacks by name. Each preset is a YAML file of parts, which Hydra composes and builds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flwr_leakage._conf import conf_dir
from flwr_leakage.attacks.base import Attack


def preset_names() -> list[str]:
    """Return the sorted names of all presets of attacks, which are the files of ``conf/attack``."""
    folder: Path = conf_dir() / "attack"
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "none")


def load_preset(name: str, overrides: Sequence[str] = ()) -> Attack:
    """Return the attack that ``conf/attack/<name>.yaml`` describes.

    Args:
        name: the name of the preset.
        overrides: changes of the preset, as on Hydra's command line without the ``attack.`` at the
            front: ``["priors.total_variation.weight=0.05"]``; ``+key=value`` adds a key and
            ``~key`` removes one.

    Raises:
        ValueError: there is no such preset, it has no such key, or a part refuses a value.
    """
    if name not in preset_names():
        raise ValueError(f"preset must be one of {preset_names()}, got {name!r}.")
    with _undisturbed():
        described = _compose(name, [])
        for override in overrides:
            _check_key(described, name, override)
        try:
            if overrides:
                described = _compose(name, overrides)
            attack = hydra.utils.instantiate(described, _convert_="all")
        except InstantiationException as error:
            raise ValueError(f"preset {name!r}: {error.__cause__ or error}") from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"preset {name!r} with {list(overrides)}: {error}") from error
    if not isinstance(attack, Attack):
        raise ValueError(f"preset {name!r} must describe an attack, got {type(attack).__name__}.")
    return attack


def _compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a preset, composed within the whole config that it may refer to.

    Overrides change the preset, as in :func:`load_preset`.
    """
    with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
        own = []
        for override in overrides:
            sign = override[: len(override) - len(override.lstrip("+~"))]
            own.append(f"{sign}attack.{override[len(sign) :]}")
        config = hydra.compose(overrides=[f"+attack={name}", *own])
    return config.attack


def _check_key(described: DictConfig, name: str, override: str) -> None:
    """Raise ``ValueError`` if an override changes a key that the preset of this name does not have.

    ``described`` is the preset's config. An override is a change such as ``priors.weight=0.05``;
    one that adds a key, ``+key=value``, is not checked.
    """
    if override.startswith("+"):
        return
    node: object = described
    key = override.lstrip("~").partition("=")[0]
    for part in key.split("."):
        keys = [str(k) for k in node if k != "_target_"] if isinstance(node, DictConfig) else []
        if part not in keys:
            raise ValueError(
                f"override {override!r} must name a key of preset {name!r}: there is no {part!r} "
                f"among {keys}."
            )
        assert isinstance(node, DictConfig)
        node = OmegaConf.select(node, part)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Clear Hydra's global state for a block, and restore it afterwards.

    A caller may itself run under ``@hydra.main``, whose state must survive.
    """
    version = VersionBase.instance().getbase()
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = version
