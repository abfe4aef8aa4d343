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


def grades_table(found: Iterable[Attempt], with_lpips: bool = True) -> Table:
    """Each grade with its rule, its number of attempts, and how sure it is.

    Args:
        found: every attempt.
        with_lpips: whether this run measured LPIPS, as the test of the grades did.
    """
    known = {each.grade: each for each in CALIBRATION}
    grades = tally(found)
    told = [_said(known[grade]) for grade in _MEANING if grade in known and grades[grade]]
    rows = []
    for grade, meaning in _MEANING.items():
        row = [grade, str(grades[grade]), meaning]
        if grade in known:
            each = known[grade]
            row += [_share(each.by_eye), _share(each.by_error), _share(each.by_structure)]
            row += [f"{each.count}" + ", exact ones included" * (grade == "recognisable")]
        else:
            row += ["–", "–", "–", "counted under “recognisable”"]
        rows.append(tuple(row))
    columns = (
        "grade", "attempts here", "when it is given",
        "original found: likeness to the eye (LPIPS"
        + "; not measured in this run" * (not with_lpips) + ")",
        "by pixels (squared error)",
        "by structure (SSIM)", "results tested",
    )  # fmt: skip
    return Table(columns, tuple(rows), (*told, READING))


def _said(each: Calibrated) -> str:
    """The row of one grade as a sentence."""
    better = " or better" * (each.grade == "recognisable")
    return (
        f"Of {each.count} results graded “{each.grade}”{better} in that test, the original was "
        f"found by likeness to the eye in {_share(each.by_eye)}, by pixels in "
        f"{_share(each.by_error)}, by structure in {_share(each.by_structure)}, and by none of the "
        f"three in {_share(each.by_none)}."
    )


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


_NOTHING = CALIBRATION[-1]

WARNING = (
    f"“Nothing” means nothing seen, not nothing there: in a test, a comparison of structure found "
    f"the original of {_share(_NOTHING.by_structure)} of {_NOTHING.count} results so graded among "
    f"{CANDIDATES} images."
)
"""What the lowest grade does not mean."""

READING = (
    f"How sure is a grade? In a test apart from this run, {TOTAL} spoilt images of CIFAR-10 and "
    f"MNIST and results of short attacks were graded by these rules. Then three measures each "
    f"looked for the original among it and {CANDIDATES - 1} other images; guessing finds it in "
    f"1 %. Several of them may find the same original, so the shares of a row do not add up. "
    f"On other kinds of images the shares may differ. Source: "
    f"simulations.benchmarks.grade_thresholds, images 100 to 109 of each set."
)
