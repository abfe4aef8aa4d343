r"""How sure the grades are: how often an original is found again by what a grade was given to.

Measured once on images that no threshold was set on, by

    python -m simulations.benchmarks.grade_thresholds --root FOLDER --backbone FILE \
        --first 100 --images 10

These are the only copies of the figures in the code; a test holds
``docs/report.md`` against them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from flwr_leakage.report.attempts import Attempt, tally
from flwr_leakage.report.grades import Grade
from flwr_leakage.report.index import Table


@dataclass(frozen=True)
class Calibrated:
    """What came of the results of one grade.

    Attributes:
        grade: ``recognisable`` includes what is exact.
        count: of results.
        by_error: the share of them that is nearest to its original, by squared error, of 101.
        by_structure: the same by SSIM.
        by_eye: the same by LPIPS, which comes nearest to what people see.
        by_all: by all three.
        by_none: by none of them.
    """

    grade: Grade
    count: int
    by_error: float
    by_structure: float
    by_eye: float
    by_all: float
    by_none: float

    @property
    def most(self) -> float:
        """The share by the measure that found most: what a grade gives away at the worst."""
        return max(self.by_error, self.by_structure, self.by_eye)


CALIBRATION = (
    Calibrated("recognisable", 243, 0.96, 0.98, 0.88, 0.84, 0.00),
    Calibrated("partly", 169, 0.53, 0.86, 0.20, 0.13, 0.10),
    Calibrated("nothing", 228, 0.15, 0.50, 0.04, 0.00, 0.50),
)
TOTAL = sum(each.count for each in CALIBRATION)
CANDIDATES = 101

_MEANING: dict[Grade, str] = {
    "exact": "on average at most one of 255 grey levels off (48.1 dB or more)",
    "recognisable": "5 dB nearer to the original than the blind guess, or SSIM 0.5 above it",
    "partly": "1.5 dB nearer, or SSIM 0.15 above",
    "nothing": "the rest, and all that is 3 dB farther: nothing seen, not nothing there",
}
_RECOGNISABLE, _PARTLY, _NOTHING = CALIBRATION


def grades_table(found: Iterable[Attempt]) -> Table:
    """Each grade with its rule, its number of attempts, and how often an original was found."""
    known = {each.grade: each for each in CALIBRATION}
    grades = tally(found)
    rows = []
    for grade, meaning in _MEANING.items():
        rate = "counted with “recognisable”"
        if grade in known:
            rate = f"{_of_hundred(known[grade].most)} of 100"
        rows.append((grade, str(grades[grade]), meaning, rate))
    columns = (
        "grade",
        "attempts here",
        "when it is given",
        "found in the test, by the best single measure",
    )
    return Table(columns, tuple(rows), (READING,), texts=("when it is given",))


def measures_table() -> Table:
    """How often each measure by itself found the original in the test."""
    rows = tuple(
        (
            each.grade + " or exact" * (each.grade == "recognisable"),
            str(each.count),
            *map(_share, (each.by_eye, each.by_error, each.by_structure, each.by_none)),
        )
        for each in CALIBRATION
    )
    columns = ("grade", "results tested", "found by likeness to the eye (LPIPS)",
               "by pixels (squared error)", "by structure (SSIM)", "by none of them")  # fmt: skip
    return Table(columns, rows, (MEASURES,))


def _of_hundred(value: float) -> str:
    return f"{100 * value:.0f}"


def _share(value: float) -> str:
    return f"{_of_hundred(value)} %"


_ANY = (
    ", ".join(f"{_of_hundred(1 - each.by_none)} of 100 “{each.grade}”" for each in CALIBRATION)
    .replace("“recognisable”", "“recognisable” or better")
)  # fmt: skip

SURENESS = (
    f"How sure are the grades? In a test apart from this run, the best single measure found the "
    f"original among {CANDIDATES} images for {_of_hundred(_RECOGNISABLE.most)} of 100 results "
    f"graded “recognisable” or better, {_of_hundred(_PARTLY.most)} of 100 “partly” and still "
    f"{_of_hundred(_NOTHING.most)} of 100 “nothing”. So “nothing” does not mean nothing is "
    f"left."
)
"""How often each grade is borne out, in words, for the head of the page."""

READING = (
    f"The test was apart from this run: {TOTAL} spoilt images of CIFAR-10 and MNIST, and results "
    f"of short attacks, were graded by these rules. Then three measures looked for the original "
    f"among it and {CANDIDATES - 1} other images; guessing finds it once in {CANDIDATES}. The "
    f"table has the measure that found most; at least one of the three found {_ANY}. On other "
    f"kinds of images the rates may differ. "
    f"Source: simulations.benchmarks.grade_thresholds, images 100 to 109 of each set."
)

MEASURES = "Several measures may find the same original, so the shares of a row do not add up."
