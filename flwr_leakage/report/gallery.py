"""Make the report's gallery: private images beside the attack's reconstructions."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flwr_leakage.report.attempts import Attempt, beyond_chance, pool_size, worst_first
from flwr_leakage.report.grades import GRADES
from flwr_leakage.report.index import CEILING_DB, Key, decibel, grouped, several, who
from flwr_leakage.tracking import ImageRecord
from flwr_leakage.untrusted import MAX_IMAGE_BYTES, MAX_PAGE_BYTES, check_png, read_file


@dataclass(frozen=True)
class Picture:
    """One image as it stands in the page's HTML.

    Attributes:
        role: ``original``, ``defended`` (as a defense encoded it), ``reconstruction``, ``decoded``
            (from the encodings of all rounds), ``blind guess`` (made without the update), or
            ``under NAME`` (the reconstruction from a copy of the update under a defense).
        uri: the PNG file as a data URI; empty if the file is missing or not as this package writes
            it.
        description: the text in place of the image.
    """

    role: str
    uri: str
    description: str


@dataclass(frozen=True)
class Exhibit:
    """The images of one sample in one round, with words about them.

    Attributes:
        key: the round, the client and the place in the batch.
        client: the client in words.
        image: the number of the image among those of the client, in words.
        others: (round, grade) of the same image in other rounds; empty if images are not numbered.
        label: the class of the sample in words; empty if unknown.
        grade: the grade of the reconstruction in words.
        psnr: words for the PSNR of the reconstruction and of a guess without the update, for the
            measure that decided the grade if PSNR did not, and for an original that is identified
            although it is not seen.
        pictures: the original, the sample as a defense encoded it, and the reconstructions without
            and with additional defenses.
    """

    key: Key
    client: str
    image: str
    others: tuple[tuple[int, str], ...]
    label: str
    grade: str
    psnr: str
    pictures: tuple[Picture, ...]

    @property
    def server_round(self) -> int:
        """Return the number of the round, counted from 1."""
        return self.key[0]

    @property
    def place(self) -> str:
        """Return the round, client, image and class of the sample in words."""
        label = f", class {self.label}" if self.label else ""
        return f"round {self.server_round}, {self.followed}{label}"

    @property
    def elsewhere(self) -> str:
        """Return words on the image's grades in other rounds; empty where none are known."""
        rounds_of = grouped((graded, server_round) for server_round, graded in self.others)
        told = [f"in {several(rounds, 'round')}: {graded}" for graded, rounds in rounds_of.items()]
        return "; ".join(told)

    @property
    def followed(self) -> str:
        """Return the client and the image in words, which are equal in all rounds if images are
        numbered.
        """
        return f"{self.client}, {self.image}"


@dataclass(frozen=True)
class Gallery:
    """The images that the page shows, with the words about them.

    Attributes:
        exhibits: all samples that are shown, the worst leak first.
        is_graded: whether any image has a grade, so that leaks can be ranked.
        left_out: the number of samples with a reconstruction that are not shown.
        without_reconstruction: the number of originals without a reconstruction.
        what_ifs: the names of the additional defenses that have images.
        blind: the guess of an image that is made without the update; ``None`` if not recorded.
    """

    exhibits: tuple[Exhibit, ...]
    is_graded: bool
    left_out: int
    without_reconstruction: int
    what_ifs: tuple[str, ...]
    blind: Picture | None = None

    @property
    def pictures(self) -> list[Picture]:
        """Return the pictures of all samples that are shown."""
        return [picture for exhibit in self.exhibits for picture in exhibit.pictures]

    @property
    def is_private(self) -> bool:
        """Return whether the gallery shows a private image, or one that was made from it."""
        return any(picture.uri for picture in self.pictures)

    def has(self, role: str) -> bool:
        """Return whether the gallery shows a picture of a role, such as ``defended``."""
        return any(picture.role == role for picture in self.pictures)

    def choices(self, name: str) -> list[str]:
        """Return the distinct values of a field of the shown samples, such as ``grade``, for a
        filter.
        """
        values = {getattr(exhibit, name) for exhibit in self.exhibits} - {""}
        if name == "followed" and not any(exhibit.others for exhibit in self.exhibits):
            return []  # no image was seen in another round
        if name == "grade":
            return [each for each in (*GRADES, "no grade") if each in values]
        return [str(value) for value in sorted(values, key=_natural)]


def make_gallery(images: Sequence[ImageRecord], found: Sequence[Attempt], limit: int) -> Gallery:
    """Return the gallery of at most ``limit`` samples with a reconstruction, the worst leak first.

    ``found`` are the outcomes of the attacks on samples, by which leaks are ranked.
    """
    by_key: dict[Key, dict[str, ImageRecord]] = {}
    guesses = sorted(
        (image for image in images if image.role == "blind_guess"), key=lambda i: i.server_round
    )
    for image in images:
        if image.role == "blind_guess":
            continue
        key = (image.server_round, image.client_id, image.sample)
        by_key.setdefault(key, {})[image.role] = image
    attempt_of = {attempt.key: attempt for attempt in found}
    same_image = grouped(((a.key[1], a.image), a) for a in found)

    is_telling = beyond_chance(found)
    shown = [key for key, roles in by_key.items() if "reconstruction" in roles]
    shown.sort(key=worst_first(attempt_of))
    sizes = (sum(image.path.stat().st_size for image in by_key[key].values()) for key in shown)
    kept = [
        key
        for key, taken in zip(shown[:limit], accumulate(sizes), strict=False)
        if taken <= MAX_PAGE_BYTES
    ]
    exhibits = tuple(
        _exhibit(key, by_key[key], attempt_of.get(key), same_image, is_telling) for key in kept
    )
    is_graded = any(key in attempt_of and attempt_of[key].grade for key in shown)
    roles = {role for key in kept for role in by_key[key] if role.startswith("what_if_")}
    names = tuple(sorted(role.removeprefix("what_if_") for role in roles))
    left_out, failed = len(shown) - len(kept), len(by_key) - len(shown)
    blind = _picture("blind guess", guesses[-1], "of every image") if guesses else None
    return Gallery(exhibits, is_graded, left_out, failed, names, blind)


def _exhibit(
    key: Key,
    roles: Mapping[str, ImageRecord],
    attempt: Attempt | None,
    same_image: Mapping[tuple[int, int | None], Sequence[Attempt]],
    is_telling: bool,
) -> Exhibit:
    known = attempt is not None and attempt.image is not None
    same = same_image[key[1], attempt.image] if attempt and known else []
    others = tuple((a.key[0], a.grade or "no grade") for a in same if a.key[0] != key[0])
    _, client_id, sample = key
    client = who(client_id) if client_id >= 0 else "aggregate"
    label = attempt.label if attempt else ""
    graded = attempt.grade if attempt and attempt.grade else "no grade"
    psnr = _written(attempt, is_telling)
    image = attempt.place if attempt else f"place {sample} of the batch"
    exhibit = Exhibit(key, client, image, others, label, graded, psnr, ())
    place = exhibit.place
    pictures = [_picture("original", roles.get("original"), place)]
    if "defended" in roles:
        pictures.append(_picture("defended", roles["defended"], place))
    pictures.append(_picture("reconstruction", roles["reconstruction"], f"{place}, {psnr}"))
    if "decoded" in roles:
        pictures.append(_picture("decoded", roles["decoded"], f"{place}, of all rounds so far"))
    for role in sorted(role for role in roles if role.startswith("what_if_")):
        name = role.removeprefix("what_if_").replace("_", " ")
        pictures.append(_picture(f"under {name}", roles[role], place))
    return replace(exhibit, pictures=tuple(pictures))


def _written(attempt: Attempt | None, is_telling: bool) -> str:
    if attempt is None or attempt.psnr is None:
        return "PSNR unknown"
    blind = f" (blind {decibel(attempt.blind)})" if attempt.blind is not None else ""
    if attempt.psnr >= CEILING_DB:
        blind += ", the ceiling"
    decided = f", {attempt.decided}" if attempt.decided else ""
    # A reconstruction that nobody would recognise may still identify its original, and the words
    # then say so.
    identified = ""
    if attempt.rank == 1 and attempt.grade not in ("exact", "recognisable"):
        whole = f" among {size} {attempt.sample.many}" if (size := pool_size(attempt)) else ""
        identified = (
            f", yet identified{whole}" if is_telling else f", identified{whole}, as chance may"
        )
    return f"{decibel(attempt.psnr)} dB{blind}{decided}{identified}"


def _picture(role: str, image: ImageRecord | None, where: str) -> Picture:
    try:
        content = b"" if image is None else read_file(image.path, MAX_IMAGE_BYTES)
        check_png(content)  # a browser is given no other file
    except (OSError, ValueError):
        return Picture(role, "", f"No {role} image, {where}")
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Picture(role, uri, f"{role.capitalize()}, {where}")


def _natural(value: object) -> tuple[int, float, str]:
    """Return a sort key by which texts that end in a number come first, in the numbers' order, and
    other texts follow in alphabetical order.
    """
    text = str(value)
    digits = text.rpartition(" ")[2]
    return (0, float(digits), text) if digits.isdecimal() else (1, 0.0, text)
