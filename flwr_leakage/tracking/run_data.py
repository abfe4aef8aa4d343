"""Read a run folder back, also one that a crash left incomplete."""

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from flwr_leakage.records import LeakageRecord, RunEvent, State
from flwr_leakage.tracking.jsonl import (
    MAX_TOKENS,
    MAX_VALUE,
    MAX_WORD,
    METADATA_FILE,
    RECORDS_FILE,
    image_path,
    is_plottable,
)
from flwr_leakage.tracking.text import plain_text, plain_tree
from flwr_leakage.tracking.tracker import check_role
from flwr_leakage.untrusted import (
    MAX_JSON_BYTES,
    MAX_LINE_BYTES,
    MAX_NAMES,
    MAX_PROBLEMS,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    MAX_UNREADABLE,
    inside,
    open_file,
    parse_json,
    read_file,
)

if TYPE_CHECKING:
    import pandas as pd

_Row = TypeVar("_Row", LeakageRecord, RunEvent)
_KINDS = get_args(LeakageRecord.__annotations__["kind"])
_STATES = get_args(State)
# Asked for once, as a run may have a million rows.
_FIELDS: Mapping[type, tuple[tuple[str, type], ...]] = {
    row_type: tuple((f.name, int if f.type is int else str) for f in fields(row_type))
    for row_type in (LeakageRecord, RunEvent)
}
_LEVELS = get_args(RunEvent.__annotations__["level"])


@dataclass(frozen=True)
class ImageRecord:
    """One image of a run.

    Attributes:
        server_round: counted from 1.
        client_id: the partition id.
        sample: index in the client's batch; reconstructions are numbered as their match.
        role: ``original``, ``reconstruction``, ``defended``, ``what_if_NAME``, or ``blind_guess``.
        path: the PNG file.
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
        server_round: counted from 1.
        client_id: the partition id.
        sample: index in the client's batch; reconstructions are numbered as their match. −1 for
            the tokens of a whole batch.
        role: ``original``, ``reconstruction``, ``named``, ``what_if_NAME``, or ``blind_guess``.
        length: the number of tokens, of which the first ones were kept.
        ids: token ids; −1 where no token was found.
        words: what they stand for, or empty.
    """

    server_round: int
    client_id: int
    sample: int
    role: str
    length: int
    ids: tuple[int, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class RunData:
    """Everything that a run folder holds.

    Attributes:
        folder: the run folder.
        metadata: the content of ``run.json``, or empty.
        records: every number, in the order of writing.
        events: every event, in the order of writing.
        images: every image whose file exists. Where one was written twice, the last is listed.
        texts: every text; where one was written twice, the last.
        closed: whether the run ended in order. If not, it was killed or still goes on.
        last_write: the time of the last change of ``records.jsonl``, ISO 8601, or empty.
        problems: what could not be read, in words.
    """

    folder: Path
    metadata: Mapping[str, Any]
    records: tuple[LeakageRecord, ...]
    events: tuple[RunEvent, ...]
    images: tuple[ImageRecord, ...]
    closed: bool
    last_write: str
    problems: tuple[str, ...]
    texts: tuple[TextRecord, ...] = ()

    def to_pandas(self) -> "pd.DataFrame":
        """All records as a table: a row a record, a column a field of ``LeakageRecord``."""
        import pandas as pd

        names = [field.name for field in fields(LeakageRecord)]
        rows = [[getattr(record, name) for name in names] for record in self.records]
        return pd.DataFrame(rows, columns=names)


def read_run(folder: str | Path) -> RunData:
    """Read a run folder. Each line that cannot be read is left out, with a warning.

    The folder may come from anybody: it is read within the bounds of ``untrusted``, nothing outside
    of it is opened, and every text in what is returned is plain (``plain_text``).

    Raises:
        FileNotFoundError: if the folder holds neither ``records.jsonl`` nor ``run.json``.
    """
    folder = Path(folder)
    path = folder / RECORDS_FILE
    if not any(os.path.lexists(folder / name) for name in (RECORDS_FILE, METADATA_FILE)):
        raise FileNotFoundError(
            f"expected a run folder with {RECORDS_FILE} or {METADATA_FILE}, got {folder}."
        )
    problems: list[str] = []
    records: list[LeakageRecord] = []
    events: list[RunEvent] = []
    images: dict[Path, ImageRecord] = {}
    texts: dict[tuple[int, int, int, str], TextRecord] = {}
    names: dict[str, set[str]] = {}
    closed = False
    for number, line in _lines(folder, problems):
        if not line.strip():
            continue
        if len(problems) > MAX_UNREADABLE:
            break  # which is told below
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"a line must have at most {MAX_LINE_BYTES:,} bytes")
            row = parse_json(line.rstrip())
            kind = row["type"]
            if kind == "record":
                record = _record(row)
                known = names.setdefault(record.kind, set())
                if record.name not in known and len(known) == MAX_NAMES:
                    raise ValueError(f"there must be at most {MAX_NAMES} names of {record.kind}s")
                known.add(record.name)
                records.append(record)
            elif kind == "event":
                events.append(_event(row))
            elif kind == "image":
                image = _image(folder, row)
                images[image.path] = image
            elif kind == "text":
                text = _text(row)
                key = text.server_round, text.client_id, text.sample, text.role
                texts[key] = text
            elif kind == "run":
                closed = row["status"] == "closed"
            else:
                raise ValueError(f"unknown type {kind!r}")
        except (ValueError, KeyError, TypeError, ArithmeticError, OSError, RecursionError) as error:
            problems.append(
                f"line {number} of {RECORDS_FILE} cannot be read ({type(error).__name__}: "
                f"{plain_text(str(error), 300)}) and is left out."
            )
    if len(problems) > MAX_PROBLEMS:
        rest = len(problems) - MAX_PROBLEMS
        end = "; no more is read" if len(problems) > MAX_UNREADABLE else ""
        problems[MAX_PROBLEMS:] = [f"{rest:,} further lines of {RECORDS_FILE} are left out{end}."]
    metadata = _read_metadata(folder, problems)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return RunData(
        folder=folder,
        metadata=metadata,
        records=tuple(records),
        events=tuple(events),
        images=tuple(images.values()),
        closed=closed,
        last_write=_modified(path) if os.path.lexists(path) else "",
        problems=tuple(problems),
        texts=tuple(texts.values()),
    )


def _lines(folder: Path, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """The lines of the record with their numbers; one that is too long is cut short."""
    if not os.path.lexists(folder / RECORDS_FILE):
        return
    try:
        with open_file(inside(folder, RECORDS_FILE), MAX_RECORDS_BYTES) as file:
            for number in range(1, MAX_RECORDS + 1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                yield number, line
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES + 1)
            if file.read(1):
                problems.append(f"{RECORDS_FILE} has over {MAX_RECORDS:,} lines; no more are read.")
    except (OSError, ValueError) as error:
        problems.append(f"{RECORDS_FILE} cannot be read ({plain_text(str(error), 300)}).")


def _record(row: Mapping[str, Any]) -> LeakageRecord:
    value = row["value"]
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"value must be a number or null, got {value!r}")
        if not is_plottable(value):
            raise ValueError(f"value must lie in ±{MAX_VALUE:g}, got {value}")
        value = float(value)
    if row["kind"] not in _KINDS:
        raise ValueError(f"kind must be one of {_KINDS}, got {row['kind']!r}")
    # Records of earlier versions have neither an error nor a state.
    if row.get("state", "") not in ("", *_STATES):
        raise ValueError(f"state must be one of {_STATES} or empty, got {row['state']!r}")
    return _row(LeakageRecord, {**row, "value": value, "error": _error(row.get("error"))})


def _error(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"error must be a number ≥ 0 or null, got {value!r}")
    if not is_plottable(value):
        raise ValueError(f"error must be at most {MAX_VALUE:g}, got {value!r}")
    return float(value)


def _event(row: Mapping[str, Any]) -> RunEvent:
    if row["level"] not in _LEVELS:
        raise ValueError(f"level must be one of {_LEVELS}, got {row['level']!r}")
    return _row(RunEvent, row)


def _row(row_type: type[_Row], row: Mapping[str, Any]) -> _Row:
    """Build a record of the known fields, with integers and text checked to be such."""
    content: dict[str, Any] = {}
    for name, expected in _FIELDS[row_type]:
        if name not in row:
            continue
        value: Any = row[name]
        content[name] = value
        if name in ("value", "error"):
            continue
        if type(value) is not expected:
            raise TypeError(f"{name} must be of type {expected.__name__}, got {value!r}")
        if isinstance(value, str) and value:
            content[name] = plain_text(value)
    return row_type(**content)


def _image(folder: Path, row: Mapping[str, Any]) -> ImageRecord:
    numbers = (row["server_round"], row["client_id"], row["sample"])
    if any(type(number) is not int for number in numbers):
        raise TypeError(f"round, client and sample must be integers, got {numbers}")
    # The path is made anew: a path in the file could point anywhere.
    path = image_path(folder, *numbers, row["role"])
    if not inside(folder, f"images/{path.name}").is_file():
        raise ValueError(f"images/{path.name} does not exist")
    return ImageRecord(*numbers, row["role"], path)


def _text(row: Mapping[str, Any]) -> TextRecord:
    numbers = (row["server_round"], row["client_id"], row["sample"])
    ids, words, length = row["ids"], row["words"], row["length"]
    if any(type(number) is not int for number in (*numbers, length, *ids)):
        raise TypeError("round, client, sample, length and ids must be integers")
    if any(type(word) is not str for word in words) or len(words) not in (0, len(ids)):
        raise TypeError(f"words must be one text for each of {len(ids)} ids, or none")
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"a text must hold at most {MAX_TOKENS} tokens, got {len(ids)}")
    check_role(row["role"])
    told = tuple(plain_text(word, MAX_WORD) for word in words)
    return TextRecord(*numbers, row["role"], length, tuple(ids), told)


def _read_metadata(folder: Path, problems: list[str]) -> dict[str, Any]:
    if not os.path.lexists(folder / METADATA_FILE):
        return {}
    try:
        metadata = parse_json(read_file(inside(folder, METADATA_FILE), MAX_JSON_BYTES))
        if not isinstance(metadata, dict):
            raise TypeError(f"expected an object, got {type(metadata).__name__}")
    except (OSError, ValueError, TypeError) as error:
        told = plain_text(str(error), 300)
        problems.append(f"{METADATA_FILE} cannot be read ({told}) and is left out.")
        return {}
    cleaned: dict[str, Any] = plain_tree(metadata)
    return cleaned


def _modified(path: Path) -> str:
    return datetime.fromtimestamp(path.lstat().st_mtime, UTC).isoformat(timespec="seconds")
