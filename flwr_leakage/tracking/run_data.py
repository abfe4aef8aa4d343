"""Read a run folder, even if a crash left it incomplete."""

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.jsonl import (
    MAX_TOKENS,
    MAX_VALUE,
    MAX_WORD,
    METADATA_FILE,
    RECORDS_FILE,
    image_path,
    is_plottable,
)
from flwr_leakage.tracking.lines import (
    ImageRecord,
    NewerVersionError,
    RunStatus,
    TextRecord,
    check_version,
    migrated,
    parsed,
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


@dataclass(frozen=True)
class RunData:
    """The content of a run folder.

    Attributes:
        folder: the run folder.
        metadata: the content of ``run.json``; empty if there is none.
        records: all records, which hold the numbers, in the order of writing.
        events: all events, in the order of writing.
        images: all images whose file exists; of an image that was written twice, the last one.
        closed: whether the run ended in order. If not, it was killed or still goes on.
        last_write: the time of the last change of ``records.jsonl`` by ISO 8601; empty if there is
            no such file.
        problems: the files and lines that could not be read, in words.
        texts: all texts; of a text that was written twice, the last one.
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
        """Return all records as a table, a row for each record and a column for each field."""
        import pandas as pd

        names = [field.name for field in fields(LeakageRecord)]
        rows = [[getattr(record, name) for name in names] for record in self.records]
        return pd.DataFrame(rows, columns=names)


def read_run(folder: str | Path) -> RunData:
    r"""Return the content of a run folder; a line that cannot be read is left out, with a warning.

    The folder may come from anybody. So the number and the length of its lines are limited
    (``untrusted``), no file outside of the folder is opened, and control characters in texts become
    escapes such as ``\u001b`` (``plain_text``). Lines of earlier versions are converted to the
    present version (``tracking.lines``).

    Raises:
        FileNotFoundError: the folder holds neither ``records.jsonl`` nor ``run.json``.
        NewerVersionError: a newer version of this package wrote the run.
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
            break  # too many unreadable lines are reported below
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"a line must have at most {MAX_LINE_BYTES:,} bytes")
            row = parse_json(line.rstrip())
            if not isinstance(row, dict):
                raise TypeError(f"a line must be an object, got {type(row).__name__}")
            row = migrated(row)
            kind = row["type"]
            if kind == "record":
                record = _record(row)
                known = names.setdefault(record.kind, set())
                if record.name not in known and len(known) == MAX_NAMES:
                    raise ValueError(f"there must be at most {MAX_NAMES} names of {record.kind}s")
                known.add(record.name)
                records.append(record)
            elif kind == "event":
                events.append(parsed(RunEvent, row))
            elif kind == "image":
                image = _image(folder, row)
                images[image.path] = image
            elif kind == "text":
                text = _text(row)
                key = text.server_round, text.client_id, text.sample, text.role
                texts[key] = text
            elif kind == "run":
                closed = parsed(RunStatus, row).status == "closed"
            else:
                raise ValueError(f"unknown type {kind!r}")
        except NewerVersionError:
            raise
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
    """Yield the lines of ``records.jsonl`` with their numbers, from 1.

    A line that is too long is cut to one byte more than ``MAX_LINE_BYTES``. A sentence is added to
    ``problems`` if the file cannot be read to its end.
    """
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
    record = parsed(LeakageRecord, row)
    value, error = record.value, record.error
    if value is not None and not is_plottable(value):
        raise ValueError(f"value must lie in ±{MAX_VALUE:g}, got {value}")
    if error is not None and not (error >= 0 and is_plottable(error)):
        raise ValueError(f"error must lie in [0, {MAX_VALUE:g}], got {error}")
    return record


def _image(folder: Path, row: Mapping[str, Any]) -> ImageRecord:
    image = parsed(ImageRecord, row)
    # The path is made from the checked fields, as the path in the file could point anywhere.
    path = image_path(folder, image.server_round, image.client_id, image.sample, image.role)
    if not inside(folder, f"images/{path.name}").is_file():
        raise ValueError(f"images/{path.name} does not exist")
    return replace(image, path=path)


def _text(row: Mapping[str, Any]) -> TextRecord:
    text = parsed(TextRecord, row)
    if len(text.words) not in (0, len(text.ids)):
        raise ValueError(f"words must be one text for each of {len(text.ids)} ids, or none")
    if len(text.ids) > MAX_TOKENS:
        raise ValueError(f"a text must hold at most {MAX_TOKENS} tokens, got {len(text.ids)}")
    check_role(text.role)
    return replace(text, words=tuple(plain_text(word, MAX_WORD) for word in text.words))


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
    version = metadata.get("version")
    if type(version) is int:
        check_version(version)
    cleaned: dict[str, Any] = plain_tree(metadata)
    return cleaned


def _modified(path: Path) -> str:
    return datetime.fromtimestamp(path.lstat().st_mtime, UTC).isoformat(timespec="seconds")
