"""Build shell commands that repeat a simulation with some of its settings changed."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr_leakage.report.index import section
from flwr_leakage.report.story import flatten

_ELSEWHERE = ("hydra", "run_dir", "objective", "tracker", "client.folder")
"""The beginnings of the names of settings that say where a run writes. A command that repeats the
run leaves them out.
"""


_PLAIN = re.compile(
    r"(?!.*(\b_[a-z]+_|\.\./))[+~]*[a-z][a-z0-9]*([_.@][a-z0-9]+)*(=[^$\\\x00-\x1f]*)?",
    re.IGNORECASE,
)
"""The pattern of a plain setting such as ``attack=idlg``: such a setting names neither
``_target_``, which Hydra would call, nor a path to another config group.
"""


def are_plain(words: Iterable[str]) -> bool:
    """Return whether all words are plain settings, such as ``attack=idlg``.

    A plain setting has no ``_target_``, which Hydra would call, and no ``$`` or ``../``, by which
    Hydra would read other values. It is safe to show in a command, even if a stranger wrote the run
    folder that holds it.
    """
    return all(map(_PLAIN.fullmatch, words))


def is_simulation(metadata: Mapping[str, Any]) -> bool:
    """Return whether a run's metadata holds the Hydra config by which the run can be repeated."""
    return isinstance(section(metadata, "config").get("choices"), Mapping)


def rerun(metadata: Mapping[str, Any], changes: Sequence[str]) -> tuple[str, ...]:
    """Return the command that repeats a simulation with changed settings; empty for other runs.

    ``changes`` are settings such as ``attack=strongest``. The run's own settings whose names begin
    like a change, such as ``attack.box``, are left out. If a setting is not safe to show, the
    result is empty, too.

    Example:
        >>> config = {"choices": {"attack": "idlg"}, "seed": 3}
        >>> command = "flwr-leakage run -m attack=idlg attack.box=false seed=2,3 run_dir=/x"
        >>> rerun({"config": config, "command": command}, ["attack=strongest"])
        ('flwr-leakage run seed=3 attack=strongest',)
    """
    if not is_simulation(metadata):
        return ()
    names = [change.partition("=")[0] for change in changes]
    kept, verb = overrides(metadata, names), "run"
    if "attack" in words_of(metadata):  # the command of that name runs one client in one round
        verb = f"attack {metadata.get('attack')}"
        if "attack=strongest" in changes:
            verb, changes = "attack strongest", [each for each in changes if "attack=" not in each]
    if not are_plain((*kept, *changes, *verb.split())):
        return ()
    return (f"flwr-leakage {' '.join((verb, *map(shlex.quote, (*kept, *changes))))}",)


def words_of(metadata: Mapping[str, Any]) -> list[str]:
    """Return the words of the command that started the run; an empty list if it is unknown."""
    command = metadata.get("command")
    try:
        return shlex.split(command) if isinstance(command, str) else []
    except ValueError:  # a quote that is not closed shows that the command was cut
        return []


def overrides(metadata: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    """Return the settings that the run's command changed, as ``name=value``.

    Of a sweep, this run's values are returned. Settings that begin with one of ``without``, or say
    where the run writes, are left out.
    """
    config, choices = section(metadata, "config"), section(metadata, "config", "choices")
    leaves = dict(flatten(config))
    kept = []
    for word in words_of(metadata):
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        if not (equals or key.startswith("~")) or name.startswith(("-", *_ELSEWHERE, *without)):
            continue
        if "," in value and value[0] not in "[{\"'":
            value = str(choices.get(name, leaves.get(name, value)))
        kept.append(f"{key}{equals}{value}")
    return kept
