"""Build objects from the sections of a config; every error names its key."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import hydra
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from flwr_leakage.simulation.arguments import check_kind, check_node, check_value
from flwr_leakage.simulation.config import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


def instantiate(config: Mapping[str, Any], key: str, kind: type = object, **given: Any) -> Any:
    """Return the object that a section of a config describes, an instance of ``kind``.

    ``key`` is the path of the section, such as ``model.network``. ``given`` are arguments of the
    section's target that the section does not hold.

    Raises:
        ConfigError: a setting is wrong. The message names the key and the reason.
    """
    node: Any = config
    for part in key.split("."):
        if part not in node:
            raise ConfigError(f"{key} must be given, got none.")
        node = node[part]
    check_node(key, node, given, kind)
    built = _instantiate(key, node, **given)
    check_kind(key, type(built), kind)
    return built


def instantiate_each(config: Mapping[str, Any], key: str, kind: type) -> dict[str, Any]:
    """Return the objects, by name, that the named sections within a section describe, instances of
    ``kind``.

    ``key`` is the path of the outer section in the config.

    Raises:
        ConfigError: a setting is wrong. The message names the key and the reason.
    """
    section = config[key]
    if not section:
        return {}
    check_value(key, section, Mapping[str, kind])
    for name, node in section.items():
        check_node(f"{key}.{name}", node, kind=kind)
    built: dict[str, Any] = _instantiate(key, section)
    for name, value in built.items():
        check_kind(f"{key}.{name}", type(value), kind)
    return built


def checked(key: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` wrapped so that its errors become a ``ConfigError`` that names
    ``key``.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"{key}: {error}") from error

    return call


def _instantiate(key: str, node: Any, **given: Any) -> Any:
    try:
        return hydra.utils.instantiate(OmegaConf.create(node), _convert_="all", **given)
    except InstantiationException as error:
        raise ConfigError(f"{key}: {error.__cause__ or error}") from error
