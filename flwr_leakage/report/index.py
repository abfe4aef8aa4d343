"""Look up a run's records by kind, name and sample, and write numbers and clients as text."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.samples import IMAGE, SAMPLES, TEXT, Sample

K = TypeVar("K")
V = TypeVar("V")
Key = tuple[int, int, int]  # round, client, sample


Series = dict[Key, LeakageRecord]


_LABELS = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "lpips": "LPIPS",
    "mse": "MSE",
    "rmse": "RMSE",
    "cpu": "CPU",
    "lambda max": "λmax",
    "lambda min": "λmin",
    "dp epsilon replace one": "ε (replace-one)",
    "dp epsilon add or remove": "ε (add-or-remove)",
}


SPARED = re.compile(r"([\d,]+) of ([\d,]+) samples not scored:")
"""The pattern of the first words in the note of a record that stands for all samples of a client
that were not scored, to limit the cost of scores.
"""


CEILING_DB = 120.0
"""The largest PSNR in dB that the evaluator records, as an error of zero has an infinite PSNR."""


MAX_ROWS = 12
"""The number of rows of a table that the page shows, a choice of layout. A click shows the others.
"""


@dataclass(frozen=True)
class Table:
    """A table of the page, in which the first cell of each row names the row.

    Attributes:
        columns: the headings of the columns.
        rows: the rows, each with one text per column.
        notes: sentences below the table.
        texts: the headings of the columns that hold words, which are aligned to the left.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def is_long(self) -> bool:
        """Return whether the page folds the rows beyond the first twelve (``MAX_ROWS``), which are
        more than three.
        """
        return len(self.rows) > MAX_ROWS + 3

    def without_decibels(self) -> "Table":
        """Return the table without those columns in decibels that have no number in any row.

        Example:
            >>> Table(("round", "best, dB"), (("1", "–"), ("2", "–"))).without_decibels().columns
            ('round',)
        """
        shown = [
            not name.endswith(", dB") or any(row[i] != "–" for row in self.rows)
            for i, name in enumerate(self.columns)
        ]
        rows = tuple(tuple(compress(row, shown)) for row in self.rows)
        return replace(self, columns=tuple(compress(self.columns, shown)), rows=rows)


class Index:
    """The records of a run, to be looked up by kind, name, round, client and sample.

    Args:
        records: the run's records in the order of writing; of two with the same kind, name, round,
            client and sample, the last one counts.
    """

    def __init__(self, records: Iterable[LeakageRecord]) -> None:
        self._series: dict[tuple[str, str], Series] = {}
        for record in records:
            key = (record.server_round, record.client_id, record.sample)
            self._series.setdefault((record.kind, record.name), {})[key] = record

    @property
    def sample(self) -> Sample:
        """Return the nouns for the run's samples; “image” if their kind is unknown."""
        if self.series("metric", "token_accuracy"):
            return TEXT
        return SAMPLES.get(unit_of(self.series("client", "images")), IMAGE)

    def names(self, kind: str) -> list[str]:
        """Return the names of the quantities of a kind of record, in the order of first writing."""
        return [name for held, name in self._series if held == kind]

    def series(self, kind: str, name: str) -> Series:
        """Return the records of a quantity by (round, client, sample); empty if there are none."""
        return self._series.get((kind, name), {})

    def rounds(self, *kinds: str) -> list[int]:
        """Return the rounds that have a record of one of the kinds, in ascending order."""
        held = {key[0] for (kind, _), series in self._series.items() if kind in kinds
                for key in series}  # fmt: skip
        return sorted(held)


def known(series: Series) -> dict[Key, float]:
    """Return the values of a series of records by (round, client, sample), without missing ones."""
    return {key: record.value for key, record in series.items() if record.value is not None}


def values(series: Series) -> list[float]:
    """Return the values of a series of records as a list, without missing ones."""
    return list(known(series).values())


def is_constant(series: Series) -> bool:
    """Return whether a series has at least two values that are not missing, and these are equal."""
    told = values(series)
    return len(told) > 1 and len(set(told)) == 1


def by_round(series: Series) -> dict[int, list[float]]:
    """Return lists of the values of a series that are not missing, keyed by the round."""
    return grouped((key[0], value) for key, value in known(series).items())


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return lists of the second entries of pairs, keyed by the first, in order of appearance."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def section(node: Any, *keys: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys in nested mappings; an empty one if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def median(numbers: Sequence[float]) -> float | None:
    """Return the median of the numbers, or ``None`` if there are none."""
    return float(np.median(numbers)) if numbers else None


def label(name: str) -> str:
    """Return the name of a quantity in a form for people.

    Example:
        >>> label("inversion_influence"), label("lambda_max"), label("psnr")
        ('inversion influence', 'λmax', 'PSNR')
    """
    words = name.replace("_", " ")
    for word, written in _LABELS.items():
        words = f" {words} ".replace(f" {word} ", f" {written} ").strip()
    return words


def heading(name: str, unit: str) -> str:
    """Return a quantity's name for people, with its unit if that is neither empty nor 1."""
    return f"{label(name)}, {unit}" if unit not in ("", "1") else label(name)


def unit_of(series: Series) -> str:
    """Return the unit of a series of records; empty for an empty series."""
    return next((record.unit for record in series.values()), "")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text with ``digits`` significant digits; a dash for ``None``, NaN and
    infinity.

    Example:
        >>> number(31.2468), number(0.0000123), number(None), number(12345.6)
        ('31.2', '1.23 × 10⁻⁵', '–', '12,346')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    sign = "−" if value < 0 else ""
    mantissa, power = f"{abs(value):.{digits - 1}e}".split("e")
    exponent = int(power)
    if -4 < exponent < 6:
        return f"{sign}{abs(value):,.{max(0, digits - 1 - exponent)}f}"
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{sign}{mantissa} × 10{raised}"


def decibel(value: float | None) -> str:
    """Return a number of decibels as text with one decimal; a dash for ``None``."""
    return "–" if value is None else f"{value:.1f}".replace("-", "−")


def percent(part: float | None, digits: int = 0) -> str:
    """Return a share of 1 as text in percent with ``digits`` decimals; a dash for ``None``.

    Example:
        >>> percent(0.934), percent(0.934, 1), percent(None)
        ('93 %', '93.4 %', '–')
    """
    return "–" if part is None else f"{100 * part:.{digits}f} %"


def share(part: int, whole: int) -> str:
    """Return text such as ``2 of 8 (25 %)``; a dash if ``whole`` is 0."""
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "–"


def count(amount: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural.

    Example:
        >>> count(1, "image"), count(3, "image"), count(0, "reply", "replies")
        ('1 image', '3 images', '0 replies')
    """
    return f"{amount:,} {singular if amount == 1 else plural or singular + 's'}"


def who(client_id: int) -> str:
    """Return words for a client by its number; a negative number is the server."""
    return f"client {client_id}" if client_id >= 0 else "server"


RANKED = (
    "Leaks are ranked by grade first, then by whether the original is identified, then by PSNR: "
    "structure (SSIM) can raise a grade, so that a worse leak may have fewer decibels."
)
"""The note below each table and gallery that ranks leaks; it says how."""


RANKED_CLIENTS = (
    "Clients are ranked by their worst grade, then by the share of attempts that are seen, then by "
    "the share that is identified, then by the highest PSNR."
)
"""The note below each table that ranks clients; it says how."""


def span(amounts: Collection[int], noun: Sample) -> str:
    """Return words for the least and the largest of several numbers of samples.

    Example:
        >>> span([4, 1, 3], IMAGE), span([1, 1], IMAGE)
        ('1 to 4 images', '1 image')
    """
    low, high = min(amounts), max(amounts)
    return f"{low:,} to {high:,} {noun.many}" if low < high else count(low, noun.one)


def several(numbers: Sequence[int], noun: str = "client", limit: int = 8) -> str:
    """Return words for clients or rounds by their numbers, or by their count.

    The count is told if the list of numbers has over ``limit`` parts; a span counts as one part.

    Example:
        >>> several([3, 4, 5, 9]), several([1]), several([0, 1], "round")
        ('clients 3 to 5 and 9', 'client 1', 'rounds 0 and 1')
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts: list[str] = []
    for first, last in spans:
        parts += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    if len(parts) > limit:
        return count(len(numbers), noun)
    listed = ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1] if parts else "none"
    return f"{noun}{'s' * (len(numbers) > 1)} {listed}"


@dataclass(frozen=True)
class Step:
    """One step of the advice: a fact to know or an action to take.

    Attributes:
        term: the subject of the step, in a word or two.
        text: the fact or action in plain sentences.
        items: the entries of a list below the text.
        note: a note in small print at the end.
        commands: the commands to be typed, one a line. The page shows them folded.
        fold: the purpose of the commands, which the page shows in their place.
    """

    term: str
    text: str
    items: tuple[str, ...] = ()
    note: str = ""
    commands: tuple[str, ...] = ()
    fold: str = ""
