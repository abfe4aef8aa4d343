"""Read files that others wrote, within bounds.

Whatever is read from a folder that somebody sent must lie inside of it, be a regular file, and be
no larger than a bound, which is checked before memory is taken.
"""

import json
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MAX_JSON_BYTES = 4 << 20
"""Most bytes of a JSON file such as ``run.json``, which has 42 kB if all scores are configured."""

MAX_DEPTH = 64
"""Most levels of nesting in a JSON file. The config of the attack preset ``strongest`` has nine."""

MAX_INTEGER = 1 << 64
"""The bound on the magnitude of integers in a file; Flower's node ids lie below it."""

MAX_LINE_BYTES = 64 << 10
"""Most bytes of a line of ``records.jsonl``: its texts have 2,000 characters at most."""

MAX_RECORDS_BYTES = 512 << 20
"""Most bytes of ``records.jsonl``: two million lines of 260 bytes, as runs write them."""

MAX_RECORDS = 2_000_000
"""Most lines of ``records.jsonl``. Each takes 0.5 kB of memory, as measured on 200,000 lines."""

MAX_NAMES = 120
"""Most different names of the quantities of one kind in a run. Each name has a chart in the report.
The score of layer shares has 107 names for a ResNet-50."""

MAX_PROBLEMS = 100
"""Most unreadable lines or files of a run that are listed one by one; the others are counted."""

MAX_UNREADABLE = 10_000
"""The number of unreadable lines after which reading ``records.jsonl`` stops. A killed run leaves
one such line each time it is killed."""

MAX_IMAGE_PIXELS = 1 << 22
"""Most pixels of an image of a run, 2,048 × 2,048: attacks reconstruct images of 224 × 224."""

MAX_IMAGE_BYTES = 16 << 20
"""Most bytes of an image file of a run: 4 per pixel, which leaves room for 3 of colour and the PNG
format's own."""

MAX_PAGE_BYTES = 256 << 20
"""Most bytes of all images in one report page. Browsers still open pages of this size, but not much
larger ones."""

MAX_PHOTO_PIXELS = 1 << 26
"""Most pixels of an image of a data set: 67 million, more than cameras of phones use."""

MAX_TENSORS_BYTES = 4 << 30
"""Most bytes of a safetensors file, or of the stored updates of one round. It is about four times
the default of ``server.kept_bytes``, the most that a run stores in all."""

MAX_HEADER_BYTES = 4 << 20
"""Most bytes of a safetensors file's header. A tensor takes about 120 bytes in it, and a stored
round of a ResNet-152 has 1,900 tensors."""

MAX_ARRAYS_BYTES = 4 << 30
"""Most bytes of an ``npz`` file's arrays, unpacked: ImageNet at 32 × 32 has 3.9 GB."""

MAX_INPUT_NUMBERS = 1 << 24
"""Most numbers of one input that an observation claims: an image of 3 × 2,048 × 2,048 has fewer."""

MAX_BATCH_NUMBERS = 1 << 28
"""Most numbers of all inputs of an update, 1 GiB: 1,700 images of 224 × 224 in colour."""


def inside(folder: Path, name: str) -> Path:
    """Return the path ``folder/name``, which need not exist; ``name`` may have several parts with
    ``/`` between them. Only the path of ``folder`` itself may lead through symbolic links.

    Raises:
        ValueError: the name leads out of the folder, or a part of it is a symbolic link.
    """
    path = folder
    pure = PurePosixPath(name)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in name:
        raise ValueError(f"{name!r} must be the name of an entry inside of the folder.")
    for part in pure.parts:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{path} must lie inside of the folder, got a symbolic link.")
    return path


def open_file(path: Path, most: int, follow: bool = False) -> BinaryIO:
    """Open a regular file of at most ``most`` bytes for reading. A pipe or device is refused at
    once, without waiting for its data. ``follow`` tells whether the path, as one that the user
    gave, may be a symbolic link.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the path is no regular file, or the file is larger.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_BINARY", 0)
    if not follow:
        if path.is_symlink():
            raise ValueError(f"{path} must be a regular file, got a symbolic link.")
        flags |= getattr(os, "O_NOFOLLOW", 0)
    if path.exists() and not path.is_file():  # opening a device may have side effects
        raise ValueError(f"{path} must be a regular file.")
    file = os.fdopen(os.open(path, flags), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        file.close()
        what = "a regular file" if not stat.S_ISREG(found.st_mode) else f"at most {most:,} bytes"
        raise ValueError(f"{path} must be {what}, got {found.st_size:,} bytes.")
    return file


def read_file(path: Path, most: int, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. ``follow`` tells whether the
    path may be a symbolic link.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the path is no regular file, or the file is larger.
    """
    with open_file(path, most, follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} must have at most {most:,} bytes, and grew while it was read.")
    return content


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text whose floats are finite, whose integers lie within
    ±``MAX_INTEGER``, and whose nesting has at most ``MAX_DEPTH`` levels.

    Raises:
        ValueError: the text is no JSON within these bounds.
    """
    text = content if isinstance(content, str) else content.decode("utf-8", "surrogatepass")
    try:
        node = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"there must be at most {MAX_DEPTH} levels of nesting.") from error
    _check_depth(node)
    return node


@contextmanager
def memory_limit(most: int | None) -> Iterator[None]:
    """Limit the memory of this process, and of each process started within the context, to ``most``
    bytes, so that larger allocations fail. ``None`` means half of the machine's memory. The limit
    is for work whose size an untrusted file decides. On Windows there is no limit.

    Raises:
        ValueError: the work within the context needed more memory.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        yield
        return
    if most is None:
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise ValueError(f"what the folder asks for takes more than {lower:,} bytes.") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text[:40])


def _integer(text: str) -> int:
    # An integer within ±2^64 has at most 21 characters; longer texts are not even parsed.
    if len(text) > 21 or abs(value := int(text)) > MAX_INTEGER:
        raise ValueError(f"an integer must lie in ±2^64, got {text[:40]}")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_number, parse_int=_integer)


def _check_depth(node: Any) -> None:
    level = [node]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for entry in level
            if isinstance(entry, dict | list)
            for child in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return
    raise ValueError(f"there must be at most {MAX_DEPTH} levels of nesting.")


def check_png(content: bytes) -> None:
    """Check, without unpacking it, that a PNG file is as this package writes it: 8 bits a channel,
    grey or colour, at most ``MAX_IMAGE_PIXELS`` pixels by its header, and no chunks besides header,
    pixels and end.

    Raises:
        ValueError: the file is of another kind.
    """
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("an image must be a PNG file.")
    place = 8
    kinds: list[bytes] = []
    while place + 12 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        if not kinds and (kind != b"IHDR" or length != 13):
            raise ValueError("a PNG file must begin with its header.")
        if kind == b"IHDR":
            width, height, *rest = struct.unpack_from(">IIBBBBB", content, place + 8)
            if rest not in ([8, 0, 0, 0, 0], [8, 2, 0, 0, 0]) or width * height < 1:
                raise ValueError("a PNG file must have 8 bits, grey or colour.")
            if width * height > MAX_IMAGE_PIXELS:
                raise ValueError(
                    f"an image must have at most {MAX_IMAGE_PIXELS:,} pixels, got {width}×{height}."
                )
        kinds.append(kind)
        place += 12 + length
    if place != len(content) or kinds != [b"IHDR", *[b"IDAT"] * (len(kinds) - 2), b"IEND"]:
        raise ValueError("a PNG file must hold its header, its pixels and its end, and no more.")


class NotTensorsError(ValueError):
    """The error for a file that is no safetensors file, or that exceeds the allowed size."""


@contextmanager
def open_tensors(path: Path, follow: bool = False) -> Iterator[Any]:
    """Yield the open safetensors file that ``safetensors.safe_open`` returns, with its methods
    ``keys``, ``get_slice``, ``get_tensor`` and ``metadata``. Reading the format runs no code.
    Opening checks that the tensors fill the file exactly, and each tensor takes memory only when it
    is read. ``follow`` tells whether the path, as one that the user gave, may be a symbolic link.

    Raises:
        FileNotFoundError: there is no such file.
        NotTensorsError: the path is no regular file, or the file is too large or no safetensors
            file.
    """
    # The import is inside the function, as only the extra ``server`` installs safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        with open_file(path, MAX_TENSORS_BYTES, follow) as file:
            length = int.from_bytes(file.read(8), "little")
    except ValueError as error:
        raise NotTensorsError(str(error)) from error
    if length > MAX_HEADER_BYTES:
        raise NotTensorsError(
            f"a header must have at most {MAX_HEADER_BYTES:,} bytes, got {length:,}"
        )
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise NotTensorsError(str(error)) from error


def check_archive(path: Path) -> None:
    """Check that a file written by ``torch.save`` is bounded in size and not compressed.
    ``torch.load(…, weights_only=True)`` then takes no more memory than the file has bytes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the path is no regular file, or the file is too large or compressed.
    """
    with open_file(path, MAX_TENSORS_BYTES, follow=True) as file:
        if not zipfile.is_zipfile(file):
            return  # torch's older format holds every number uncompressed
        with zipfile.ZipFile(file) as held:
            entries = held.infolist()
            size = os.fstat(file.fileno()).st_size
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
        raise ValueError(f"{path} must hold entries as they are, got packed ones.")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"{path} says that its entries have more bytes than it has itself.")


def read_npz(path: Path, names: Sequence[str]) -> list[NDArray]:
    """Return arrays of an ``npz`` file in the order of ``names``, read without pickle, after a
    check of their unpacked size. The path, which the user gave, may be a symbolic link.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no ``npz`` file, lacks an array of ``names``, or holds arrays of
            more than ``MAX_ARRAYS_BYTES`` in all.
    """
    try:
        with open_file(path, MAX_ARRAYS_BYTES, follow=True) as file, zipfile.ZipFile(file) as held:
            found = {name.removesuffix(".npy") for name in held.namelist()}
            if missing := [name for name in names if name not in found]:
                raise ValueError(f"it lacks {missing} and has {sorted(found)}")
            total = sum(_claimed(held, f"{name}.npy") for name in names)
            if total > MAX_ARRAYS_BYTES:
                raise ValueError(
                    f"its arrays must have at most {MAX_ARRAYS_BYTES:,} bytes, got {total:,}"
                )
            return [_array(held, f"{name}.npy") for name in names]
    except (EOFError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _claimed(held: zipfile.ZipFile, name: str) -> int:
    """Return the number of bytes that an array of an ``npz`` archive will take in memory.

    Raises:
        ValueError: the sizes in the archive's directory and in the array's own header differ.
    """
    with held.open(name) as member:
        version = np.lib.format.read_magic(member)
        read = {(1, 0): np.lib.format.read_array_header_1_0}
        header = read.get(version, np.lib.format.read_array_header_2_0)
        shape, _, dtype = header(member)
        claimed = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and member.tell() + claimed != held.getinfo(name).file_size:
            raise ValueError(f"{name} says that it has {claimed:,} bytes, and has others")
    return max(claimed, held.getinfo(name).file_size)


def _array(held: zipfile.ZipFile, name: str) -> NDArray:
    with held.open(name) as member:
        array: NDArray = np.lib.format.read_array(member, allow_pickle=False)
        return array
