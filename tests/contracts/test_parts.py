"""Scores, defenses, objectives, priors and attacks, found by themselves in their packages.

Whoever adds one adds a module, a name in the package's ``__all__``, a YAML file and a row in the
docs' table. These tests find the module, and fail when one of the others is missing.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from flwr_leakage.defenses.base import Defense

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Room:
    """A kind of part, and where its parts have to be named.

    Attributes:
        package: whose modules define them.
        face: the package that exports them.
        parameters: of their ``__call__``, which tell them from other classes; none for defenses.
        docs: the page with their table.
        left_out: classes that are no parts of their own, with the reason.
    """

    package: str
    face: str
    parameters: tuple[str, ...]
    docs: str
    left_out: tuple[str, ...] = ()


ROOMS = {
    "score": Room("flwr_leakage.scores", "flwr_leakage.scores", ("client", "seed"), "scores"),
    "defense": Room("flwr_leakage.defenses", "flwr_leakage.defenses", (), "defenses"),
    "objective": Room(
        "flwr_leakage.attacks.inversion.objectives",
        "flwr_leakage.attacks",
        ("candidate", "observed"),
        "attacks",
    ),
    "prior": Room(
        "flwr_leakage.attacks.inversion.priors",
        "flwr_leakage.attacks",
        ("inputs", "context"),
        "attacks",
    ),
    "attack": Room(
        "flwr_leakage.attacks",
        "flwr_leakage.attacks",
        ("job", "progress"),
        "attacks",
        ("Parallel",),  # how an attack is run: server.attack_workers of the config
    ),
}


def classes_of(package: str) -> Iterator[type]:
    """All classes that the modules of a package define."""
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == info.name:
                yield value


def is_part(room: Room, cls: type) -> bool:
    """Whether a class is one of a room's parts, not their base or protocol."""
    if cls.__name__.startswith("_") or cls.__name__ in room.left_out or inspect.isabstract(cls):
        return False
    if not room.parameters:
        return issubclass(cls, Defense) and cls is not Defense
    if getattr(cls, "_is_protocol", False) or "__call__" not in dir(cls):
        return False
    call = inspect.signature(cls.__call__)
    return tuple(call.parameters)[1:] == room.parameters


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
    return getattr(importlib.import_module(module), name)


CONFIGURED = {
    class_of(target)
    for path in (ROOT / "conf").rglob("*.yaml")
    for target in targets_in(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    if target.startswith("flwr_leakage.")
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


@pytest.mark.parametrize(("room", "cls"), PARTS)
def test_a_part_is_exported(room, cls):
    assert cls.__name__ in importlib.import_module(room.face).__all__


@pytest.mark.parametrize(("room", "cls"), PARTS)
def test_a_part_has_a_config(room, cls):
    assert cls in CONFIGURED, f"no file below conf/ has the _target_ {cls.__name__}"


OPTIONS = [
    pytest.param(path.stem, page, id=f"{group}={path.stem}")
    for group, page in (("score", "scores"), ("defense", "defenses"), ("attack", "attacks"))
    for path in sorted((ROOT / "conf" / group).glob("*.yaml"))
    if path.stem not in ("none", "all", "default")
]


@pytest.mark.parametrize(("option", "page"), OPTIONS)
def test_an_option_stands_in_the_table_of_the_docs(option, page):
    assert option in names_in_tables(page)


@pytest.mark.parametrize(
    ("room", "cls"), [p for p in PARTS if p.id.split()[0] in ("objective", "prior")]
)
def test_a_part_of_an_attack_stands_in_the_table_of_the_docs(room, cls):
    assert cls.__name__ in names_in_tables(room.docs)
