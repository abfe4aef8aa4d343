"""Every attack on a single image, and the fate of every client's update."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr_leakage.report.grades import GRADES, Grade, decided_by, grade
from flwr_leakage.report.index import Index, Key

LEAKED = ("exact", "recognisable")
"""The grades that count as leaked."""


@dataclass(frozen=True)
class Attempt:
    """What an attack made of one private image in one round.

    Attributes:
        key: round, client, sample.
        psnr: in dB, or ``None`` without a reconstruction.
        blind: PSNR of the blind guess, or ``None`` where it was not recorded.
        rank: the place of the original among the candidates, or ``None``.
        candidates: in words, such as ``of 101 candidates``.
        label: the class in words, or empty.
        image: the number of the image among those of its client, by which it can be followed over
            the rounds; ``None`` where the truth does not tell images apart.
        grade: ``None`` where it cannot be told.
        decided: by what other than PSNR the grade was decided, in words; empty where by PSNR.
    """

    key: Key
    psnr: float | None
    blind: float | None
    rank: float | None
    candidates: str
    label: str
    image: int | None
    grade: Grade | None
    decided: str = ""

    @property
    def place(self) -> str:
        """Which image it is, in words: by its number, or else by its place in the batch."""
        if self.image is None:
            return f"place {self.key[2]} of the batch"
        return f"image {self.image}"

    @property
    def leak(self) -> tuple[int, float]:
        """Larger for a worse leak: by grade, then by PSNR."""
        place = GRADES.index(self.grade) if self.grade else len(GRADES)
        return -place, self.psnr if self.psnr is not None else float("-inf")


def attempts(index: Index, what_if: str = "") -> list[Attempt]:
    """Every image that was attacked; with a name, under that what-if defense instead."""
    kind, before = ("what_if", f"{what_if}/") if what_if else ("metric", "")
    lpips = next((n for n in index.names(kind) if n.startswith(f"{before}lpips")), "")

    def value(name: str, key: Key) -> float | None:
        record = index.series(kind, name).get(key)
        return record.value if record is not None else None

    named = [n for n in index.names(kind) if n.startswith(before) and n != f"{before}blind_psnr"]
    keys = {key for name in named for key in index.series(kind, name) if key[2] >= 0}
    ranks = index.series(kind, f"{before}identification_rank")
    classes, images = index.series("client", "class"), index.series("client", "image")
    found = []
    for key in sorted(keys):
        psnr, blind = value(f"{before}psnr", key), value(f"{before}blind_psnr", key)
        seen = (psnr, blind, value(f"{before}ssim", key), value(f"{before}blind_ssim", key),
                value(lpips, key))  # fmt: skip
        rank, label, image = ranks.get(key), classes.get(key), images.get(key)
        found.append(
            Attempt(
                key,
                psnr,
                blind,
                rank.value if rank else None,
                rank.note if rank else "",
                label.note if label else "",
                int(image.value) if image and image.value is not None else None,
                grade(*seen),
                decided_by(*seen),
            )
        )
    return found


def what_if_names(index: Index) -> list[str]:
    """The names of the defenses that updates were attacked under besides."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in index.names("what_if")))


def tally(found: Iterable[Attempt]) -> Counter[Grade]:
    """How many of each grade; those that cannot be graded are left out."""
    return Counter(attempt.grade for attempt in found if attempt.grade is not None)


def all_exact(found: Iterable[Attempt]) -> set[tuple[int, int]]:
    """The (round, client) of every update of which each image is exact."""
    held = list(found)
    return {a.key[:2] for a in held} - {a.key[:2] for a in held if a.grade != "exact"}


def worst_by_image(found: Iterable[Attempt]) -> list[Attempt]:
    """The worst attempt on each image; empty where one of them cannot be told from others."""
    worst: dict[tuple[int, int], Attempt] = {}
    for attempt in found:
        if attempt.image is None:
            return []
        key = (attempt.key[1], attempt.image)
        if key not in worst or attempt.leak > worst[key].leak:
            worst[key] = attempt
    return list(worst.values())


def seen_of(each: Sequence[Attempt]) -> str:
    """How many images can be seen, given the worst attempt on each: the one count of the page."""
    leaked = sum(attempt.grade in LEAKED for attempt in each)
    whole = "the one attacked image" if len(each) == 1 else f"the {len(each):,} attacked images"
    return whole if leaked == len(each) == 1 else f"{leaked:,} of {whole}"


def risk(found: Sequence[Attempt]) -> tuple[int, float, float]:
    """Larger for whom more leaks of: by the worst grade, the share that leaks, the highest PSNR.

    The one order of the verdict and of the table of clients.
    """
    if not found:
        return -len(GRADES) - 1, 0.0, float("-inf")
    place, _ = max(attempt.leak for attempt in found)
    share = sum(attempt.grade in LEAKED for attempt in found) / len(found)
    return place, share, max((a.psnr for a in found if a.psnr is not None), default=float("-inf"))


def grouped_by_client(found: Iterable[Attempt]) -> dict[int, list[Attempt]]:
    """The attempts on each client's images."""
    groups: dict[int, list[Attempt]] = {}
    for attempt in found:
        groups.setdefault(attempt.key[1], []).append(attempt)
    return groups


def most_at_risk_first(by_client: Mapping[int, Sequence[Attempt]]) -> list[int]:
    """The clients, whom most leaks of first; those of equal risk by their numbers."""
    return sorted(sorted(by_client), key=lambda client: risk(by_client[client]), reverse=True)


@dataclass(frozen=True)
class Fates:
    """What became of clients' updates, by (round, client).

    Attributes:
        answered: attacked, with a reconstruction.
        unanswered: attacked without one, with the reason: the attack could not be applied, or
            gave nothing.
        spared: not attacked, with the reason.
    """

    answered: frozenset[tuple[int, int]]
    unanswered: Mapping[tuple[int, int], str]
    spared: Mapping[tuple[int, int], str]


def fates(index: Index) -> Fates:
    """Read the fate of every update from the records."""
    answers = index.series("attack", "objective")
    answered = {key[:2] for key, record in answers.items() if record.value is not None}
    failed = {key[:2]: record.note for key, record in answers.items() if record.value is None}
    spared = {key[:2]: r.note for key, r in index.series("client", "not_attacked").items()}
    return Fates(frozenset(answered), failed, spared)


def does(index: Index) -> dict[int, str]:
    """What each client does in a round, in words: as of its last one."""
    series = index.series("client", "images")
    return {key[1]: series[key].note for key in sorted(series)}
