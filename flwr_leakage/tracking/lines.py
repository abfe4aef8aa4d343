"""Define the format of ``records.jsonl``: the kinds of lines, their version, and a JSON schema.

A line is a JSON object. Its ``type`` names its kind, its ``version`` the format, and its other
entries are the fields of that kind's dataclass. The checks when a run is read, and the JSON schema,
are made from the annotations of those dataclasses.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.text import plain_text

VERSION = 2
"""The version of the format that this package writes. Lines of version 1 lack the entry
``version``.
"""


@dataclass(frozen=True)
class ImageRecord:
    """One image of a run.

    Attributes:
        server_round: the number of the round, from 1.
        client_id: the client's partition id.
        sample: the index in the client's batch; a reconstruction has that of its matched original.
        role: ``original``, ``reconstruction``, ``defended`` (as a defense encoded it), ``decoded``
            (from the encodings of all rounds), ``what_if_NAME`` (the reconstruction under a
            defense), or ``blind_guess``.
        path: the PNG file; in ``records.jsonl``, its path relative to the run folder.
    """

    server_round: int
    client_id: int
    sample: int
    role: str
    path: Path


@dataclass(frozen=True)
class TextRecord:
    """One text of a run.

    Attributes:
        server_round: the number of the round, from 1.
        client_id: the client's partition id.
        sample: the index in the client's batch; a reconstruction has that of its matched original.
            −1 for tokens that are known to occur in some text of the batch.
        role: ``original``, ``reconstruction``, ``named`` (tokens that occur in some text of the
            batch), ``what_if_NAME`` (recovered under a defense), or ``blind_guess``.
        length: the number of tokens of the whole text; of a longer one, only the first 1024 are
            kept.
        ids: the token ids; −1 where no token was found.
        words: the word of each token id; empty if they are unknown.
    """

    server_round: int
    client_id: int
    sample: int
    role: str
    length: int
    ids: tuple[int, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class RunStatus:
    """The beginning, the resumption or the orderly end of a run.

    Attributes:
        status: ``open`` when the run begins or resumes, ``closed`` when it ends in order; the last
            of these lines tells the run's state.
        time: the time of the line, in UTC by ISO 8601.
    """

    status: Literal["open", "closed"]
    time: str


LINES: Mapping[str, type] = {
    "record": LeakageRecord,
    "event": RunEvent,
    "image": ImageRecord,
    "text": TextRecord,
    "run": RunStatus,
}
"""The dataclass of each kind of line of ``records.jsonl``, by the line's ``type``."""

_Line = TypeVar("_Line", LeakageRecord, RunEvent, ImageRecord, TextRecord, RunStatus)
_Row = Mapping[str, Any]


class NewerVersionError(ValueError):
    """The error for a run in a format that is newer than this version of the package."""


def _to_2(row: _Row) -> _Row:
    """Return a line of version 1 as a line of version 2.

    In version 2 a number has all optional fields, which version 1 leaves out where they are empty.
    """
    if row.get("type") != "record":
        return row
    return {"unit": "", "direction": "", "note": "", "error": None, "state": "", **row}


MIGRATIONS: Mapping[int, Callable[[_Row], _Row]] = {1: _to_2}
"""For each earlier version, a function that turns its lines into lines of the next version."""


def migrated(row: _Row) -> _Row:
    """Return a line of any version so far, a JSON object, as one of the present version.

    Raises:
        NewerVersionError: the line's version is newer than this package's.
        TypeError: the line's version is no integer from 1 on.
    """
    version = row.get("version", 1)
    if type(version) is not int or version < 1:
        raise TypeError(f"version must be an integer from 1 on, got {version!r}")
    check_version(version)
    for step in range(version, VERSION):
        row = MIGRATIONS[step](row)
    return row


def check_version(version: int) -> None:
    """Refuse a version of the format of ``records.jsonl`` that this package cannot read.

    Raises:
        NewerVersionError: the version is newer than this package's.
    """
    if version > VERSION:
        raise NewerVersionError(
            f"the run holds records of version {version}, and this flwr-leakage reads versions up "
            f"to {VERSION}: update flwr-leakage to open it."
        )


def parsed(kind: type[_Line], row: _Row) -> _Line:
    """Return a line, a JSON object, as an instance of the dataclass ``kind``.

    Entries that are no field of the dataclass are left out.

    Raises:
        KeyError: the line lacks a field.
        TypeError: a field is of another type than its annotation says.
    """
    content: dict[str, Any] = {}
    for name, hint, fits in _CHECKS[kind]:
        value = row[name]
        if not fits(value):
            raise TypeError(f"{name} must be {_told(hint)}, got {value!r}")
        if type(value) is str:
            value = Path(value) if hint is Path else plain_text(value)
        elif type(value) is int and hint is not int:
            value = float(value)
        content[name] = tuple(value) if type(value) is list else value
    return kind(**content)


_JSON_TYPES = {int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}


def _node(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type annotation of a field, such as ``{"type": "integer"}``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        nodes = [_node(each) for each in args]
        if all("enum" in node for node in nodes):
            return {"enum": [value for node in nodes for value in node["enum"]]}
        return {"type": [node["type"] for node in nodes]}
    if origin is tuple:
        return {"type": "array", "items": _node(args[0])}
    return {"type": _JSON_TYPES[hint]}


_TYPES: Mapping[str, list[type]] = {
    "integer": [int], "number": [float, int], "string": [str], "null": [NoneType],
}  # fmt: skip
"""The Python types that a JSON value may have, by the name of its type in a JSON schema."""


def _check(node: Mapping[str, Any]) -> Callable[[object], bool]:
    """Return a function that takes a JSON value and tells whether it fits the schema of a field."""
    if "enum" in node:
        return lambda value: value in node["enum"]
    if "items" in node:
        fits_entry = _check(node["items"])
        return lambda value: type(value) is list and all(map(fits_entry, value))
    names = node["type"] if isinstance(node["type"], list) else [node["type"]]
    types = [known for name in names for known in _TYPES[name]]
    return lambda value: type(value) in types


def _told(hint: Any) -> str:
    """Return in words the JSON type that a field with the annotation ``hint`` must have."""
    node = _node(hint)
    if "enum" in node:
        return f"one of {node['enum']}"
    if "items" in node:
        return f"an array of {node['items']['type']}s"
    kinds = node["type"]
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


_CHECKS: Mapping[type, tuple[tuple[str, Any, Callable[[object], bool]], ...]] = {
    kind: tuple((name, hint, _check(_node(hint))) for name, hint in get_type_hints(kind).items())
    for kind in LINES.values()
}
"""For each dataclass of a line, its fields: the name, the annotation, and a function that tells
whether a JSON value fits the annotation. The functions are made once, as a run has many lines.
"""


def _descriptions(kind: type) -> dict[str, str]:
    """Return the description of each attribute in a dataclass's docstring, by its name."""
    _, _, told = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", told, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a line of ``records.jsonl`` of any type."""
    kinds = []
    for name, kind in LINES.items():
        hints, told = get_type_hints(kind), _descriptions(kind)
        own = {f.name: {**_node(hints[f.name]), "description": told[f.name]} for f in fields(kind)}
        properties = {"type": {"const": name}, **own, "version": {"const": VERSION}}
        kinds.append(
            {
                "title": name,
                "description": inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
                "type": "object",
                "properties": properties,
                "required": list(properties),
            }
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of records.jsonl",
        "oneOf": kinds,
    }
