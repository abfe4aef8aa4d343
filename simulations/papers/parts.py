"""Finished parts of an experiment on disk, so that a killed run goes on without repeating them."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr_leakage import __version__
from simulations.papers.findings import Row


def digest(settings: Mapping[str, Any]) -> str:
    """A name for settings: 16 hexadecimal digits of the SHA-256 of their sorted JSON.

    Raises:
        TypeError: a value is neither plain nor a dataclass of plain values.
    """
    text = as_json({**settings, "version": __version__})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_json(settings: object) -> str:
    """Settings as JSON with sorted keys; dataclasses as their class and fields.

    Raises:
        TypeError: a value is neither plain nor a dataclass of plain values.
    """
    return json.dumps(settings, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """A dataclass as its class and fields; a dataclass within it is its fields without its class.

    Settings must not tell two inner classes of equal fields apart by the class alone: a defense
    of a recipe goes in by its ``repr``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__name__, **asdict(value)}
    raise TypeError(f"settings must hold plain values and dataclasses, got {type(value).__name__}.")


def blocks(first: int, count: int, most: int = 10) -> list[tuple[int, int]]:
    """The first one and the number of each block of ``count`` successive images or batches.

    A part of a larger size is of one block, so that it reads the blocks that a smaller size has.
    """
    end = first + count
    return [(begin, min(most, end - begin)) for begin in range(first, end, most)]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that another process sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    write(unfinished)
    unfinished.replace(path)


@dataclass(frozen=True)
class Spent:
    """CPU seconds of this process that a part took when it was computed."""

    part: str
    seconds: float


@dataclass(frozen=True)
class Parts:
    """The parts of one experiment.

    Attributes:
        folder: where they are kept, one file each.
        tell: is given a line for each part that is computed.
        spent: a ledger by digest: what the parts of this run took, whenever that was.
    """

    folder: Path
    tell: Callable[[str], None] = print
    spent: dict[str, Spent] = field(default_factory=dict)

    def __call__(
        self, name: str, settings: Mapping[str, Any], compute: Callable[[], list[Row]]
    ) -> list[Row]:
        """The rows of a part, computed or read back.

        Args:
            name: of the part, for people.
            settings: everything that its rows depend on; a file with the same settings is read.
            compute: gives the rows.
        """
        path = self.folder / f"{digest({'part': name, **settings})}.json"
        if not path.is_file():
            self.tell(f"{datetime.now(UTC):%H:%M:%S} {name}")
            began = time.process_time()
            rows = compute()
            seconds = round(time.process_time() - began, 2)
            found = {"part": name, "settings": settings, "rows": rows, "cpu_seconds": seconds}
            text = json.dumps(found, default=_plain)
            write_atomically(path, lambda unfinished: unfinished.write_text(text))
        # Always as read back: a first run and a later one then give the same table.
        stored = json.loads(path.read_text())
        self.count(path.stem, name, stored["cpu_seconds"])
        return stored["rows"]

    def count(self, key: str, name: str, seconds: float) -> None:
        """Add to the ledger what something took; each key, such as a digest, counts once."""
        self.spent.setdefault(key, Spent(name, seconds))
