"""Check the names in an untrusted config before anything in it is imported or built.

Two kinds of config are untrusted: the run config of Flower, which the person who submits a run
writes (see ``own_config``), and the config in ``run.json`` of a run folder that somebody sent (see
``later``). Both may name only classes that the packaged config names, with the same ways to call
them. So the packaged config is the list of what is allowed, and no other list has to be maintained.
It excludes dotted paths through a module of this package to another package, such as
``flwr_leakage.attacks.presets.hydra.utils.call``.
"""

import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.arguments import hints
from flwr_leakage.simulation.config import Config, ConfigError

FOLDER_GROUPS = (
    "attack", "dataset", "defense", "gate", "metric", "model", "partition", "score", "scoring",
    "selection", "self_attack", "strategy", "threat",
)  # fmt: skip
"""The config groups whose classes the config of a run folder may name: those that attacks need.

``tracker`` is not among them, as it sends numbers and images elsewhere, nor are ``engine`` and
``experiment``.
"""

_Call = tuple[tuple[str, str], ...]
"""The entries of a section that tell Hydra what to call, as pairs (key, value): ``_target_``,
``_partial_``, ``_args_``, …."""


def check_targets(config: Config, groups: Collection[str] | None = None) -> None:
    """Check that the packaged config has all classes of a config, and all the ways in which it
    calls them.

    Interpolations are an error as well. Honest configs are resolved before they are written or
    sent; a remaining interpolation, such as ``${oc.env:HOME}``, would be resolved on this machine.
    Only classes of the config groups ``groups`` are allowed; with ``None`` those of all groups are.

    Raises:
        ConfigError: the config has another class or call, or an interpolation. The message names
            the first one.
    """
    known = {
        call
        for group, node in _packaged()
        if groups is None or group in groups
        for _, call, _ in _calls(node)
    }
    for path, call, _ in _calls(config):
        if call not in known:
            raise ConfigError(
                f"{path} must be a class of the packaged config, with the same keys _…_ as there, "
                f"got {dict(call)}: a run config cannot name others."
            )
    for path, text in _texts(config):
        if "${" in text:
            raise ConfigError(f"{path} must be resolved, got the interpolation {text!r}.")


def paths_outside(
    config: Config, folder: Path, allowed: Sequence[Path] = ()
) -> list[tuple[str, str]]:
    """Return pairs (key, path) of the paths in a config that lead out of its run folder.

    A text is a path if the annotation of its argument is ``os.PathLike``. Paths that the packaged
    config has, too, are left out, and so are those into ``allowed`` folders and files. The classes
    of the config must have been checked before, as they are imported here.
    """
    packaged = {path for _, node in _packaged() for _, path in _paths(node)}
    places = [place.expanduser().resolve() for place in (folder, *allowed)]
    return [
        (key, path[2])
        for key, path in _paths(config)
        if path not in packaged
        and not any(map(Path(path[2]).expanduser().resolve().is_relative_to, places))
    ]


@lru_cache(maxsize=1)
def _packaged() -> tuple[tuple[str, Any], ...]:
    """Return pairs (group, content) of every packaged config file, and of every section of
    ``config.yaml``.
    """
    found: list[tuple[str, Any]] = []
    for file in sorted(conf_dir().rglob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(content, dict)
        if file.parent == conf_dir():
            found += [(str(key), section) for key, section in content.items()]
        else:
            found.append((file.parent.name, content))
    return tuple(found)


def _calls(node: Any, path: str = "config") -> Iterator[tuple[str, _Call, Mapping[str, Any]]]:
    """Yield (path, call, section) for every section within ``node`` for which Hydra would call
    something.

    ``call`` are the section's entries with keys of the form ``_NAME_``, such as ``_target_``. The
    argument ``path`` is the path of ``node`` in the config.
    """
    if isinstance(node, Mapping):
        special = [(str(k), str(v)) for k, v in node.items() if re.fullmatch("_.+_", str(k))]
        if special:
            yield path, tuple(sorted(special)), node
        for key, value in node.items():
            yield from _calls(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _calls(value, f"{path}[{index}]")


def _texts(node: Any, path: str = "config") -> Iterator[tuple[str, str]]:
    """Yield (path, text) for every text and every key within ``node``, nested dictionaries and
    lists.
    """
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield path, str(key)
            yield from _texts(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _texts(value, f"{path}[{index}]")


_Path = tuple[str, str, str]
"""A section's target, the name of one of its arguments that takes a path, and the path."""


def _paths(node: Any) -> Iterator[tuple[str, _Path]]:
    for key, _, section in _calls(node):
        target = str(section.get("_target_", ""))
        for name in path_arguments(target):
            if isinstance(value := section.get(name), str):
                yield f"{key}.{name}", (target, name, value)


@lru_cache(maxsize=256)
def path_arguments(target: str) -> tuple[str, ...]:
    """Return the names of those arguments of a class or function that take a path.

    ``target`` is its dotted name, such as ``package.module.Class``; an empty one gives no names.
    """
    if not target:
        return ()
    found = hints(hydra.utils.get_object(target))
    return tuple(name for name, kind in found.items() if _takes_path(kind))


def _takes_path(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    own = isinstance(origin, type) and issubclass(origin, os.PathLike)
    return own or any(map(_takes_path, typing.get_args(kind)))
