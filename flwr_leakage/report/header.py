"""What was run: the facts at the top of the page, and the configuration line by line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.budget import time_limit

_WITHHELD = ("labels inferred", "batch norm none")
GROUPS = ("dataset", "partition", "model", "strategy", "defense", "attack")
_GIVEN = {
    "labels known": "the true labels",
    "labels inferred": "the labels (the attack infers them from the update)",
    "batch norm exact": "the exact statistics of batch normalisation of the private batch",
    "batch norm derived": "statistics of batch normalisation, derived from the client’s buffers",
    "batch norm running": "the running statistics of batch normalisation that it sent itself",
    "batch norm none": "statistics of batch normalisation",
    "local schedule known": "the number of images, and the learning rate, number of steps and "
    "batch size of local training",
    "single view": "each client's update on its own",
    "aggregate view": "only the aggregate of the clients' updates",
}


@dataclass(frozen=True)
class Fact:
    """One line of the header.

    Attributes:
        term: what was chosen, such as ``defense``.
        value: what it is, such as ``GradientPruning``.
        settings: its settings in words, such as ``prune ratio 0.9``; shown in small print.
    """

    term: str
    value: str
    settings: str = ""


def facts(metadata: Mapping[str, Any]) -> list[Fact]:
    """Return the dataset, partition, model, strategy, defense, attack and seed, where known."""
    config = metadata.get("config")
    config = config if isinstance(config, Mapping) else {}
    found = []
    for group in GROUPS:
        name, settings = describe(config.get(group))
        if group == "attack":
            settings = _attack_settings(config, time_limit(metadata))
        given = metadata.get(group)
        if isinstance(given, str) and given:
            name = given
        if group == "defense" and metadata.get("own_config_clients"):
            settings = ""  # they are those of the run's config, which these clients did not follow
        if group == "attack" and name == "none":
            settings = ""
        if name:
            found.append(Fact(group, name, settings))
    if isinstance(metadata.get("seed"), int):
        found.append(Fact("seed", str(metadata["seed"])))
    return found


def _attack_settings(config: Mapping[str, Any], limit: float | None) -> str:
    """The settings of the attack with the time that it had, whoever limited it."""
    node, server = config.get("attack"), config.get("server")
    if not isinstance(node, Mapping):
        return ""
    _, settings = describe({key: value for key, value in node.items() if key != "max_seconds"})
    time = f"at most {limit:g} CPU seconds for an update" if limit is not None else ""
    own = node.get("max_seconds")
    given = server.get("attack_max_seconds") if isinstance(server, Mapping) else None
    if time and own is not None and given is not None and own != given:
        time += (
            f" (of server.attack_max_seconds={given:g} and attack.max_seconds={own:g} the smaller "
            f"one holds)"
        )
    return ", ".join(filter(None, (settings, time)))


def describe(node: Any) -> tuple[str, str]:
    """Return the name and the plain settings of a configured part.

    Example:
        >>> describe({"_target_": "a.b.GradientPruning", "prune_ratio": 0.9})
        ('GradientPruning', 'prune ratio 0.9')
    """
    if isinstance(node, str):
        return node, ""
    if not isinstance(node, Mapping):
        return "", ""
    name = str(node.get("name") or _target(node))
    settings = [
        _setting(str(key).replace("_", " ").strip(), value)
        for key, value in node.items()
        if key not in ("_target_", "name")
        and not str(key).startswith("_")
        and (isinstance(value, bool | int | float | str) or _target(value))
    ]
    return name, ", ".join(settings[:8])


def _setting(words: str, value: Any) -> str:
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {_target(value) or value}"


def _target(node: Any) -> str:
    """The class or function that a part is made by, without its module."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def given_to_attacker(metadata: Mapping[str, Any]) -> list[str]:
    """Return, in words, what the threat model gives the attacker; empty if it is unknown.

    Example:
        >>> given_to_attacker({"threat": "labels known, batch norm none, single view"})
        ['the true labels', 'each client’s update on its own']
    """
    return [_words(phrase) for phrase in _threat(metadata) if phrase not in _WITHHELD]


def withheld_from_attacker(metadata: Mapping[str, Any]) -> list[str]:
    """Return, in words, what the threat model does not give the attacker.

    Example:
        >>> withheld_from_attacker({"threat": "labels known, batch norm none, single view"})
        ['statistics of batch normalisation']
    """
    return [_words(phrase) for phrase in _threat(metadata) if phrase in _WITHHELD]


def _threat(metadata: Mapping[str, Any]) -> list[str]:
    threat = metadata.get("threat")
    told = threat.split(",") if isinstance(threat, str) else []
    return [phrase.strip() for phrase in told if phrase.strip()]


def _words(phrase: str) -> str:
    return _GIVEN.get(phrase, phrase).replace("'", "’")


def planned_rounds(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of rounds that the run was to have, where it says so."""
    config = metadata.get("config")
    for place in (metadata, config, *(_groups(config))):
        if isinstance(place, Mapping):
            planned = place.get("num_rounds")
            if isinstance(planned, int) and not isinstance(planned, bool):
                return planned
    return None


def _groups(config: Any) -> list[Any]:
    return list(config.values()) if isinstance(config, Mapping) else []


def flatten(node: Any, path: str = "") -> list[tuple[str, str]]:
    """Return a nested configuration as ``(path, value)`` lines, as Hydra's overrides name them.

    Example:
        >>> flatten({"attack": {"steps": 3, "parts": ["a", None]}})
        [('attack.steps', '3'), ('attack.parts.0', 'a'), ('attack.parts.1', 'null')]
    """
    entries: list[tuple[Any, Any]] = []
    if isinstance(node, Mapping):
        entries = list(node.items())
    elif isinstance(node, list):
        entries = list(enumerate(node))
    if not entries:
        return [(path, _scalar(node))]
    lines = []
    for key, value in entries:
        lines += flatten(value, f"{path}.{key}" if path else str(key))
    return lines


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return str(value)
