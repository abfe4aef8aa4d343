"""The gallery of the report: private images beside what the attack made of them."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from flwr_leakage.report.index import Index, Key, decibel, who
from flwr_leakage.tracking import ImageRecord

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """One image, inlined.

    Attributes:
        role: ``original``, ``defended`` or ``reconstruction``.
        uri: the PNG file as a data URI; empty where the file is missing or no PNG file.
        description: the text in place of the image.
    """

    role: str
    uri: str
    description: str


@dataclass(frozen=True)
class Exhibit:
    """The images of one sample.

    Attributes:
        place: round, client and sample, in words.
        psnr: the PSNR of the reconstruction in dB, or that it is unknown.
        recovered: whether it counts as recovered.
        pictures: original, defended where there is one, reconstruction.
    """

    place: str
    psnr: str
    recovered: bool
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Gallery:
    """What is shown of all images.

    Attributes:
        exhibits: the highest PSNR first.
        left_out: samples with a reconstruction that are not shown.
        without_reconstruction: samples whose original is there, but no reconstruction.
    """

    exhibits: tuple[Exhibit, ...]
    left_out: int
    without_reconstruction: int


def make_gallery(
    images: Sequence[ImageRecord], index: Index, recovered_psnr: float, limit: int
) -> Gallery:
    """Choose the samples with a reconstruction, worst leak first, and inline their images."""
    by_key: dict[Key, dict[str, ImageRecord]] = {}
    for image in images:
        key = (image.server_round, image.client_id, image.sample)
        by_key.setdefault(key, {})[image.role] = image
    psnr = {
        key: record.value
        for key, record in index.series("metric", "psnr").items()
        if record.value is not None
    }
    shown = [key for key, roles in by_key.items() if "reconstruction" in roles]
    shown.sort(key=lambda key: (-psnr.get(key, float("-inf")), key))
    exhibits = tuple(
        _exhibit(key, by_key[key], psnr.get(key), recovered_psnr) for key in shown[:limit]
    )
    return Gallery(exhibits, len(shown) - len(exhibits), len(by_key) - len(shown))


def _exhibit(
    key: Key, roles: dict[str, ImageRecord], psnr: float | None, recovered_psnr: float
) -> Exhibit:
    server_round, client_id, sample = key
    client = who(client_id) if client_id >= 0 else "aggregate"
    place = f"round {server_round}, {client}, sample {sample}"
    written = _written(psnr, recovered_psnr)
    pictures = [_picture("original", roles.get("original"), place)]
    if "defended" in roles:
        pictures.append(_picture("defended", roles["defended"], place))
    pictures.append(_picture("reconstruction", roles["reconstruction"], f"{place}, {written}"))
    recovered = psnr is not None and psnr >= recovered_psnr
    return Exhibit(place, written, recovered, tuple(pictures))


def _written(psnr: float | None, recovered_psnr: float) -> str:
    if psnr is None:
        return "PSNR unknown"
    # One decimal would show 24.96 as 25.0, that is, as recovered.
    near = abs(psnr - recovered_psnr) < 0.05
    return f"{psnr:.2f} dB" if near else f"{decibel(psnr)} dB"


def _picture(role: str, image: ImageRecord | None, where: str) -> Picture:
    content = image.path.read_bytes() if image is not None else b""
    if not content.startswith(_PNG_SIGNATURE):
        return Picture(role, "", f"No {role} image, {where}")
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Picture(role, uri, f"{role.capitalize()}, {where}")
