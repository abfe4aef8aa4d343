"""Write a run folder: ``records.jsonl``, ``images/*.png`` and ``run.json``.

``records.jsonl`` is only ever appended to. Each line is a strict JSON object and is written by a
single ``write`` on an ``O_APPEND`` descriptor: a killed process loses at most the line that it was
writing. The folder holds private images, so only its owner can read the files that are made here.
"""

import io
import json
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.lines import VERSION, ImageRecord, TextRecord
from flwr_leakage.tracking.text import plain_text
from flwr_leakage.tracking.tracker import check_role, checked_pixels
from flwr_leakage.untrusted import inside

RECORDS_FILE = "records.jsonl"
METADATA_FILE = "run.json"
MAX_VALUE = 1e100
MAX_TOKENS = 1024
"""The largest number of tokens of a text in ``records.jsonl``, a choice that bounds a line's
length. The rest is cut.
"""

MAX_WORD = 60
"""The largest number of characters of a word in ``records.jsonl``, a choice that bounds a line's
length. The rest is cut.
"""

SYNC_SECONDS = 5.0
"""The least time in seconds between two synchronisations of ``records.jsonl`` with the disk. A
synchronisation takes longer than writing a round's lines, and common file systems make one about as
often. Lines since the last one can be lost if the machine fails.
"""

_encode = json.JSONEncoder(allow_nan=False).encode


def image_path(folder: Path, server_round: int, client_id: int, sample: int, role: str) -> Path:
    """Return the path of an image in a run folder; the file's name holds only integers and the
    role.

    ``sample`` is the index in the client's batch. The role is the kind of image, such as
    ``original``.

    Raises:
        ValueError: the role is none of ``ROLES`` and not ``what_if_NAME``.
    """
    check_role(role)
    name = f"round{int(server_round):04d}_client{int(client_id):04d}_sample{int(sample):04d}"
    return folder / "images" / f"{name}_{role}.png"


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 atomically: a reader sees either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(
        missing_ok=True
    )  # remove the file of a killed process, or a link that would redirect the write
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Make a folder with mode 0700; an existing folder keeps its mode."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


class JsonlTracker:
    """A tracker that appends every number, event and image of a run to the run's folder.

    ``records.jsonl`` is synchronised with the disk when the round changes, at most once in 5 s, in
    ``flush`` and in ``close``. This protects the lines if the machine fails. If only the process is
    killed, its lines survive without a synchronisation.

    Args:
        folder: the run folder; made with mode 0700 if it does not exist.
        resume: whether to continue the run that the folder holds. If a crash left its last line
            incomplete, a line break is written first, so that only this last line is lost.

    Raises:
        ValueError: the file of records is no regular file, or a symbolic link leads out of the
            folder.
        FileExistsError: the folder holds a run, and ``resume`` is not set: the numbers of two runs
            in one file could not be told apart.
    """

    def __init__(self, folder: str | Path, resume: bool = False) -> None:
        self.folder = Path(folder)
        make_private_folder(self.folder)
        make_private_folder(inside(self.folder, "images"))
        path = inside(self.folder, RECORDS_FILE)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a regular file.")
        if not resume and path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"folder must be a new one, got {self.folder}, which holds a run: choose another, "
                f"or move that run away."
            )
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._torn = _ends_without_newline(self._descriptor)
        self._closed = False
        self._server_round: int | None = None
        self._synchronised = -math.inf
        self._append({"type": "run", "status": "open", "time": _now()})

    def log(self, record: LeakageRecord) -> None:
        """Append one record, which holds a number, to ``records.jsonl`` as a line.

        A number that is not finite or lies beyond ±10¹⁰⁰ is recorded as missing, with a note that
        tells its value.
        """
        row = {**vars(record), "note": plain_text(record.note)}
        if record.value is not None:
            value = float(record.value)
            row["value"] = value
            if not is_plottable(value):
                row |= {"value": None, "note": f"value is {value}; {row['note']}".rstrip("; ")}
                row |= {"error": None, "state": ""}
        if record.error is not None and not is_plottable(record.error):
            row["error"] = None
        self._enter(record.server_round)
        self._append({"type": "record", **row})

    def event(self, event: RunEvent) -> None:
        """Append one event to ``records.jsonl``, as a line."""
        self._enter(event.server_round)
        self._append({"type": "event", **vars(event), "message": plain_text(event.message)})

    def image(
        self, server_round: int, client_id: int, sample: int, role: str, pixels: Tensor
    ) -> None:
        """Write one image as a PNG file of 8 bits, then append a line that names the file.

        ``sample`` is the index in the client's batch. ``pixels`` are (C, H, W) in [0, 1] with C of
        1 or 3; values beyond are clamped. The role is the kind of image, such as ``original``.

        Raises:
            ValueError: the pixels have another shape, or the role is unknown.
        """
        path = image_path(self.folder, server_round, client_id, sample, role)
        write_private(path, _png(checked_pixels(pixels, role)))
        self._enter(server_round)
        row = ImageRecord(int(server_round), int(client_id), int(sample), role, path)
        self._append({"type": "image", **vars(row), "path": f"images/{path.name}"})

    def text(self, text: TextRecord) -> None:
        """Append a line with one text, of which at most the first 1024 tokens are kept.

        Raises:
            ValueError: the role of the text is unknown.
        """
        check_role(text.role)
        self._enter(text.server_round)
        ids, words = text.ids[:MAX_TOKENS], text.words[:MAX_TOKENS]
        plain = [plain_text(word, MAX_WORD) for word in words]
        self._append({"type": "text", **vars(text), "ids": ids, "words": plain})

    def flush(self) -> None:
        """Synchronise everything written so far with the disk."""
        os.fsync(self._descriptor)
        self._synchronised = time.monotonic()

    def close(self) -> None:
        """Append the line that says that the run ended in order, and close the file.

        A second call does nothing.
        """
        if self._closed:
            return
        self._append({"type": "run", "status": "closed", "time": _now()})
        self.flush()
        os.close(self._descriptor)
        self._closed = True

    def _enter(self, server_round: int) -> None:
        if server_round == self._server_round:
            return
        is_first, self._server_round = self._server_round is None, server_round
        if not is_first and time.monotonic() - self._synchronised >= SYNC_SECONDS:
            self.flush()

    def _append(self, row: dict[str, Any]) -> None:
        if self._closed:
            raise ValueError(f"the tracker of {self.folder} is closed.")
        line = _encode({**row, "version": VERSION}).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        self._torn = True  # the flag stays set until the whole line is known to be written
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{RECORDS_FILE} took {written} of {len(line)} bytes: disk full?")
        self._torn = False


def is_plottable(value: float) -> bool:
    """Return whether a number is finite and at most 1e100 in size, so that means of many do not
    overflow.
    """
    return math.isfinite(value) and abs(value) <= MAX_VALUE


def _ends_without_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _png(pixels: Tensor) -> bytes:
    from PIL import Image  # a client that keeps scores only needs no such package

    levels = (pixels * 255).round().byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels).save(buffer, "PNG")
    return buffer.getvalue()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
