"""Scores, defenses, objectives, priors and attacks, found by themselves where they are defined.

Whoever adds one adds a class and a YAML file that names it; for an objective or a prior also a row
in the docs' table. These tests find the class, and fail when one of the others is missing.
"""

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from flwr_leakage.defenses.base import Defense
from flwr_leakage.records import Measurement, Reconstruction
from flwr_leakage.simulation.config import compose

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Room:
    """A kind of part, and where its parts have to be named.

    Attributes:
        package: the package, or the module, that defines them.
        returns: what their ``__call__`` is annotated to return; ``None`` where the package has no
            other classes with a ``__call__``.
        left_out: classes that are no parts of their own, with the reason.
    """

    package: str
    returns: Any
    left_out: tuple[str, ...] = ()


ROOMS = {
    "score": Room("flwr_leakage.scores", list[Measurement]),
    "defense": Room("flwr_leakage.defenses", None),
    "objective": Room("flwr_leakage.attacks.inversion.objectives", None),
    "prior": Room("flwr_leakage.attacks.inversion.objectives", None),
    "attack": Room(
        "flwr_leakage.attacks",
        list[Reconstruction],
        ("Parallel",),  # how an attack is run: server.attack_workers of the config
    ),
}


def classes_of(package: str) -> Iterator[type]:
    """All classes that a module, or the modules of a package, define."""
    root = importlib.import_module(package)
    inside = pkgutil.walk_packages(getattr(root, "__path__", []), f"{package}.")
    for name in (package, *(info.name for info in inside)):
        for value in vars(importlib.import_module(name)).values():
            if inspect.isclass(value) and value.__module__ == name:
                yield value


def is_part(room: Room, cls: type) -> bool:
    """Whether a class is one of a room's parts, not their base or protocol."""
    if cls.__name__.startswith("_") or cls.__name__ in room.left_out or inspect.isabstract(cls):
        return False
    if room is ROOMS["defense"]:
        return issubclass(cls, Defense) and cls is not Defense
    if getattr(cls, "_is_protocol", False) or "__call__" not in dir(cls):
        return False
    returned = typing.get_type_hints(inspect.unwrap(cls.__call__)).get("return")
    return room.returns is None or returned == room.returns


PARTS = [
    pytest.param(room, cls, id=f"{kind} {cls.__name__}")
    for kind, room in ROOMS.items()
    for cls in classes_of(room.package)
    if is_part(room, cls)
]


def targets_in(node: Any) -> Iterator[str]:
    """All ``_target_`` entries of a config."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets_in(value)
    if isinstance(node, list):
        for value in node:
            yield from targets_in(value)


def class_of(target: str) -> type:
    module, _, name = target.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    return MissingName if found is None else found


class MissingName:
    """Stands for a ``_target_`` that is not exported, which a test of its own tells."""


def own_targets(path: Path) -> list[str]:
    """The classes of this package that a YAML file names."""
    found = targets_in(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    return [target for target in found if target.startswith("flwr_leakage.")]


CONFIGURED = {
    class_of(target) for path in (ROOT / "conf").rglob("*.yaml") for target in own_targets(path)
}


def names_in_tables(page: str) -> set[str]:
    """Words in backticks in the table rows of a page of the docs."""
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    return {
        name for line in lines if line.startswith("|") for name in re.findall(r"`([^`]+)`", line)
    }


def test_every_kind_of_part_is_found():
    found = {param.id.split()[0] for param in PARTS}
    assert found == set(ROOMS)
    assert {"attack GradientInversion", "prior TotalVariation", "score LAVP"} <= {
        param.id for param in PARTS
    }


def test_every_target_of_the_configs_exists():
    missing = [
        f"{path.name}: {target}"
        for path in (ROOT / "conf").rglob("*.yaml")
        for target in own_targets(path)
        if class_of(target) is MissingName
    ]
    assert not missing


@pytest.mark.parametrize(("room", "cls"), PARTS)
def test_a_part_has_a_config(room, cls):
    assert cls in CONFIGURED, f"no file below conf/ has the _target_ {cls.__name__}"


OPTIONS = {
    (group, path.stem): set(map(class_of, own_targets(path)))
    for group in ("score", "defense", "attack")
    for path in sorted((ROOT / "conf" / group).glob("*.yaml"))
    if path.stem not in ("all", "default")
}
"""The classes in each option of a group, but for those that gather others."""


def test_all_scores_are_in_the_option_all(tmp_path):
    gathered = compose(["score=all"], str(tmp_path))["score"]
    chosen = {class_of(target) for target in targets_in(gathered)}
    missing = {p.values[1] for p in PARTS if p.id.startswith("score ")} - chosen
    assert not missing, "a file of conf/score/ must be named after each class, such as psnr_bound"


@pytest.mark.parametrize(
    ("room", "cls"), [p for p in PARTS if p.id.split()[0] in ("score", "defense", "attack")]
)
def test_a_part_can_be_chosen_by_name(room, cls):
    chosen = [option for option, classes in OPTIONS.items() if cls in classes]
    assert chosen, f"{cls.__name__} is in no option of a config group of its own"


@pytest.mark.parametrize(
    ("room", "cls"), [p for p in PARTS if p.id.split()[0] in ("objective", "prior")]
)
def test_a_part_of_an_attack_stands_in_the_table_of_the_docs(room, cls):
    rows = names_in_tables("attacks")
    assert cls.__name__ in rows, f"docs/attacks.md must name `{cls.__name__}` in its table"
