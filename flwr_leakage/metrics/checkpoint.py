"""Fetch and check the trained networks that LPIPS needs: checkpoints of torchvision."""

import hashlib
import os
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import torch

SECONDS = 10.0
"""The longest time in seconds that a run waits for a checkpoint. The value is a choice, by which a
run with a bad connection soon goes on without LPIPS. SqueezeNet's checkpoint has 5 MB. VGG-16's has
530 MB, which a slow connection does not fetch in this time.
"""

OFFLINE = "FLWR_LEAKAGE_OFFLINE"
"""The name of an environment variable. If its value is not empty, no checkpoint is fetched."""

URLS = {
    "alex": "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
    "vgg": "https://download.pytorch.org/models/vgg16-397923af.pth",
    "squeeze": "https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth",
}
"""The URLs of torchvision's checkpoints, by the name of LPIPS's backbone. A file's name ends in the
first digits of its SHA-256.
"""


class BackboneUnavailableError(RuntimeError):
    """The error for missing trained weights of LPIPS's backbone. With random weights, the distance
    would not be LPIPS.
    """


def hub_folder() -> Path:
    """Return the folder in which torch and other programs keep downloaded checkpoints."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def checkpoint(url: str, folder: Path, download: bool, seconds: float = SECONDS) -> Path:
    """Return the path of a checkpoint's file, which is fetched if it is not there yet.

    Args:
        url: the checkpoint's URL, which ends in ``-DIGEST.pth``; ``DIGEST`` is the beginning of the
            file's SHA-256.
        folder: the folder in which the file is kept. Several processes may fetch at a time.
        download: whether the file may be fetched.
        seconds: the largest number of seconds that the download may take.

    Raises:
        BackboneUnavailableError: the file is not there and cannot be fetched, or its digest is
            wrong. The message gives the reason and what to do.
    """
    path = folder / url.rpartition("/")[2]
    if path.is_file():
        if not matches(path):
            raise BackboneUnavailableError(f"{path} is damaged (wrong digest); delete it")
        return path
    reason = "download is off"
    if download and os.environ.get(OFFLINE):
        reason = f"{OFFLINE} is set"
    elif download:
        try:
            fetch(url, path, seconds)
            return path
        except (OSError, ValueError) as error:
            reason = f"it could not be fetched: {error}"
    raise BackboneUnavailableError(
        f"no trained backbone is at hand ({reason}); put {path.name} into {folder}, or name a file "
        f"by metric.lpips.backbone=FILE"
    )


def matches(path: Path) -> bool:
    """Return whether a file's SHA-256 begins with the digest in the file's name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().startswith(_digest(path))


def fetch(url: str, path: Path, seconds: float) -> None:
    """Download a file to ``path`` in at most ``seconds`` seconds, and remove what was fetched in
    part.

    The file's name ends in ``-DIGEST.SUFFIX``; ``DIGEST`` is the beginning of its SHA-256. The
    transfer runs in a thread, as no time limit of a socket covers the look-up of a host name.

    Raises:
        OSError: there is no network, or it is too slow.
        ValueError: the file's SHA-256 does not begin with the digest in its name.
    """
    outcome: list[bytes | Exception] = []
    end = time.monotonic() + seconds

    def transfer() -> None:
        try:
            outcome.append(_read(url, end))
        except Exception as error:
            outcome.append(error)

    worker = threading.Thread(target=transfer, daemon=True)
    worker.start()
    worker.join(seconds)
    if not outcome:
        raise TimeoutError(f"not there after {seconds:g} seconds")
    if isinstance(outcome[0], Exception):
        raise OSError(str(outcome[0]) or type(outcome[0]).__name__) from outcome[0]
    if not hashlib.sha256(outcome[0]).hexdigest().startswith(_digest(path)):
        raise ValueError(f"what {url} gave has another digest than {_digest(path)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        part.write_bytes(outcome[0])
        part.replace(path)


def _digest(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _read(url: str, end: float) -> bytes:
    content = bytearray()
    with urllib.request.urlopen(url, timeout=max(end - time.monotonic(), 0.01)) as answer:
        while block := answer.read1(1 << 16):
            content += block
            if time.monotonic() > end:
                raise TimeoutError("too slow")
    return bytes(content)
