"""A page is shared: no path in it says who ran the audit, or where that person's files lie."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr_leakage.tracking import RunData

# The run may have been made on another machine, so its user's folder is told by where it lies.
_HOMES = (
    r"[^\s\"'=:;,()]*/(?:home|Users)/[^/\s\"'=:;,()]+"
    r"|(?<![\w.])/root(?![\w.-])"
    r"|\b[A-Za-z]:\\+Users\\+[^\\\s\"'=:;,()]+"
)


@lru_cache(maxsize=4096)
def homeless(text: str) -> str:
    r"""Write every user's home folder in a text as ``~``.

    Example:
        >>> homeless("put a.pth into /home/jo/.cache/torch or C:\\Users\\jo\\torch")
        'put a.pth into ~/.cache/torch or ~\\torch'
    """
    return _pattern(str(Path.home())).sub("~", text)


@lru_cache(maxsize=8)
def _pattern(home: str) -> "re.Pattern[str]":
    here = rf"{re.escape(home)}(?![\w.-])|" if len(home) > 1 else ""
    return re.compile(here + _HOMES)


def without_home(run: RunData) -> RunData:
    """The run with ``~`` in place of every user's home folder, in each text that it holds."""
    return replace(
        run,
        metadata=_cleaned(run.metadata),
        records=tuple(
            replace(record, note=homeless(record.note)) if record.note else record
            for record in run.records
        ),
        events=tuple(replace(event, message=homeless(event.message)) for event in run.events),
        problems=tuple(map(homeless, run.problems)),
    )


def _cleaned(node: Any) -> Any:
    if isinstance(node, str):
        return homeless(node)
    if isinstance(node, Mapping):
        return {key: _cleaned(value) for key, value in node.items()}
    return [_cleaned(value) for value in node] if isinstance(node, list) else node
