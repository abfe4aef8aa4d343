"""Grade a reconstruction in four steps, by comparing it with a blind guess.

A PSNR in decibels by itself says little: a grey image has 12 dB on CIFAR-10. So every
reconstruction is compared with the *blind guess*, what the server could guess of the sample without
its update: in a simulation the mean image of its own test set, else the mean colour of the
normalisation. The thresholds of the two middle grades are measured by
``simulations/benchmarks/grade_thresholds.py``: three judges, which are squared error, SSIM and
LPIPS, look for the original among 100 other images. The thresholds, with their reasons:

- ``exact``: a PSNR of at least 48.1 dB = 20·log₁₀ 255. The error is at most one grey level of 255
  (root mean square), so that the two files look the same on any screen.
- ``recognisable``: a PSNR at least 5 dB above the blind guess' (a third of its squared error), or
  an SSIM at least 0.5 above the blind guess'. From these margins on, a judge other than the one
  that measures the margin finds the original at least every second time (measured: from 4.9 dB and
  from 0.50 on), where a random guess does once in 101. PSNR alone would miss faint but plain
  digits.
- ``partly``: a PSNR at least 1.5 dB above the blind guess', or an SSIM at least 0.15 above. LPIPS,
  the judge that comes nearest to people, is right from there on about once in four times, and below
  once in fifty.
- ``nothing``: the rest, and whatever has a PSNR of 3 dB or more *below* the blind guess' (twice its
  squared error), whatever its SSIM is.

If LPIPS is computed, a value of at most 0.1 raises ``partly`` to ``recognisable``.

A reconstruction may also be the original up to brightness and contrast, which people see through
and squared error does not. For this, the reconstruction and the blind guess are each given the one
brightness and contrast that bring them nearest the original. If the PSNR of the reconstruction is
then 10 dB above the blind guess' (a tenth of its squared error), it is ``recognisable`` *up to
brightness and contrast*. A smaller difference says nothing, as the fit uses the original: another
image of the same class comes at most 9 dB above the blind guess
(simulations/benchmarks/results/report.md, "Up to brightness and contrast").
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from flwr_leakage.report.index import Table, percent

Grade = Literal["exact", "recognisable", "partly", "nothing"]


GRADES: tuple[Grade, ...] = ("exact", "recognisable", "partly", "nothing")


EXACT_DB = 20 * math.log10(255)


RECOGNISABLE_DB, RECOGNISABLE_SSIM, RECOGNISABLE_LPIPS = 5.0, 0.5, 0.1


PARTLY_DB, PARTLY_SSIM = 1.5, 0.15


NOTHING_DB = -3.0


AFFINE_DB = 10.0


def grade(
    psnr: float | None,
    blind_psnr: float | None,
    ssim: float | None = None,
    blind_ssim: float | None = None,
    lpips: float | None = None,
    affine_psnr: float | None = None,
    blind_affine_psnr: float | None = None,
) -> Grade | None:
    """Return the grade of a reconstruction: ``exact``, ``recognisable``, ``partly`` or ``nothing``.

    The thresholds are those at the head of the module. The grade is ``None`` if there is no
    reconstruction, or no blind guess (made without the update) to compare it with.

    Args:
        psnr: the PSNR of the reconstruction in dB; ``None`` if there is none.
        blind_psnr: the PSNR in dB of the blind guess for the same sample.
        ssim: the SSIM of the reconstruction.
        blind_ssim: the SSIM of the blind guess.
        lpips: the LPIPS of the reconstruction.
        affine_psnr: ``psnr`` after the best change of brightness and contrast.
        blind_affine_psnr: ``blind_psnr`` after the blind guess' own best change.

    Example:
        >>> grade(20.0, 12.0), grade(9.0, 12.0), grade(13.0, 12.0, ssim=0.7, blind_ssim=0.1)
        ('recognisable', 'nothing', 'recognisable')
    """
    if psnr is None:
        return None
    if psnr >= EXACT_DB:
        return "exact"
    if blind_psnr is None:
        return None
    fitted = affine_psnr is not None and blind_affine_psnr is not None
    if fitted and affine_psnr - blind_affine_psnr >= AFFINE_DB:  # type: ignore[operator]
        return "recognisable"
    nearer = psnr - blind_psnr
    known = ssim is not None and blind_ssim is not None
    structure = ssim - blind_ssim if known else 0.0  # type: ignore[operator]
    if nearer <= NOTHING_DB:
        return "nothing"
    if nearer >= RECOGNISABLE_DB or structure >= RECOGNISABLE_SSIM:
        return "recognisable"
    if nearer >= PARTLY_DB or structure >= PARTLY_SSIM:
        near = lpips is not None and lpips <= RECOGNISABLE_LPIPS
        return "recognisable" if near else "partly"
    return "nothing"


NAMED = 0.5
"""The least share of a text's distinct tokens that an attack must know to occur in the batch for
the text to count as ``partly`` seen. The value is a choice, and was not measured.
"""

_OF_TEXTS: dict[str, Grade] = {
    "all tokens": "exact", "most tokens": "recognisable", "some tokens": "partly",
    "no more than a guess": "nothing",
}  # fmt: skip
"""The grade of a recovered text, by the words for its token accuracy
(``flwr_leakage.metrics.TextGrade``).
"""


def text_grade(told: str | None, named: float | None) -> Grade | None:
    """Return the grade of a reconstructed text, ``exact`` to ``nothing``; ``None`` if nothing is
    known.

    Args:
        told: how many tokens are in their place, as ``all tokens``; ``None`` if no text was
            recovered.
        named: the share of the text's distinct tokens that the attack knows to occur in the batch;
            from 0.5 on (``NAMED``), the text counts as ``partly`` seen.

    Example:
        >>> text_grade("all tokens", 1.0), text_grade(None, 0.8), text_grade(None, 0.1)
        ('exact', 'partly', 'nothing')
    """
    given = None if told is None else _OF_TEXTS.get(told)
    if named is None:
        return given
    least: Grade = "partly" if named >= NAMED else "nothing"
    return min(given or least, least, key=GRADES.index)


def decided_by(
    psnr: float | None,
    blind_psnr: float | None,
    ssim: float | None = None,
    blind_ssim: float | None = None,
    lpips: float | None = None,
    affine_psnr: float | None = None,
    blind_affine_psnr: float | None = None,
) -> str:
    """Return in words the measure that decided a grade; empty if PSNR alone would have given it.

    See :func:`grade` for the arguments.

    Example:
        >>> decided_by(13.0, 12.0, ssim=0.7, blind_ssim=0.1), decided_by(20.0, 12.0, ssim=0.7)
        ('by SSIM 0.70 (blind 0.10)', '')
    """
    affine = affine_psnr, blind_affine_psnr
    given = grade(psnr, blind_psnr, ssim, blind_ssim, lpips, *affine)
    if given == grade(psnr, blind_psnr):
        return ""
    plain = grade(psnr, blind_psnr, ssim, blind_ssim, lpips)
    if given != plain:
        fitted = f"{affine_psnr:.1f} dB up to brightness and contrast"
        written = f"by {fitted} (blind {blind_affine_psnr:.1f})"
    elif given == grade(psnr, blind_psnr, ssim, blind_ssim):
        written = f"by SSIM {ssim:.2f} (blind {blind_ssim:.2f})"
    else:
        written = f"by LPIPS {lpips:.2f}"
    return written.replace("-", "−")


@dataclass(frozen=True)
class Calibrated:
    r"""The shares of reconstructions of a grade by which the original is found among 101 images.

    The figures were measured once, on images on which no threshold was set, by

        python -m simulations.benchmarks.grade_thresholds --root FOLDER --backbone FILE \
            --first 100 --images 10

    Attributes:
        grade: the grade; ``recognisable`` includes exact reconstructions.
        count: the number of reconstructions.
        by_error: the share that is nearer in squared error to its original than to 100 others.
        by_structure: the share that is nearer to its original by SSIM.
        by_eye: the share that is nearer to its original by LPIPS, which comes nearest to what
            people see.
        by_all: the share that is nearer to its original by all three measures.
        by_none: the share that is nearer to its original by none of the three.
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
        """Return the largest of ``by_error``, ``by_structure`` and ``by_eye``."""
        return max(self.by_error, self.by_structure, self.by_eye)


CALIBRATION = (
    Calibrated("recognisable", 243, 0.96, 0.98, 0.88, 0.84, 0.00),
    Calibrated("partly", 169, 0.53, 0.86, 0.20, 0.13, 0.10),
    Calibrated("nothing", 228, 0.15, 0.50, 0.04, 0.00, 0.50),
)


TOTAL = sum(each.count for each in CALIBRATION)


POOL = 101
_MEANING: dict[Grade, str] = {
    "exact": "on average at most one of 255 grey levels off (48.1 dB or more)",
    "recognisable": "5 dB nearer to the original than the blind guess, or SSIM 0.5 above it; or "
    "10 dB nearer once each has the brightness and contrast that suit the original best",
    "partly": "1.5 dB nearer, or SSIM 0.15 above",
    "nothing": "the rest, and all that is 3 dB farther: nothing seen, not nothing there",
}


_RECOGNISABLE, _PARTLY, _NOTHING = CALIBRATION


def grades_table(grades: Counter[Grade]) -> Table:
    """Return a table of each grade: its rule, and its number in the run.

    ``grades`` counts the run's reconstructions by grade.
    """
    rows = tuple((grade, str(grades[grade]), meaning) for grade, meaning in _MEANING.items())
    return Table(("grade", "attempts here", "when it is given"), rows, texts=("when it is given",))


def measures_table() -> Table:
    """Return a table of how often LPIPS, MSE and SSIM each found the original among 101 images."""
    rows = tuple(
        (
            each.grade + " or exact" * (each.grade == "recognisable"),
            str(each.count),
            *map(percent, (each.by_eye, each.by_error, each.by_structure, each.by_none)),
        )
        for each in CALIBRATION
    )
    columns = ("grade", "results tested", "found by likeness to the eye (LPIPS)",
               "by pixels (squared error)", "by structure (SSIM)", "by none of them")  # fmt: skip
    return Table(columns, rows, (READING, MEASURES))


SURENESS = (
    f"How sure are the grades? In a test apart from this run, the best single measure found the "
    f"original among {POOL} images for {percent(_RECOGNISABLE.most)} of the results graded "
    f"“recognisable” or better, {percent(_PARTLY.most)} of “partly” and still "
    f"{percent(_NOTHING.most)} of “nothing”. So “nothing” does not mean nothing is "
    f"left."
)
"""Sentences for the page on how often the original of a reconstruction is found among 101 images,
by grade.
"""


READING = (
    f"The test was apart from this run: {TOTAL} spoilt images of CIFAR-10 and MNIST, and results "
    f"of short attacks, were graded by these rules. Then three measures looked for the original "
    f"among it and {POOL - 1} other images; guessing finds it once in {POOL}. On other kinds of "
    f"images the rates may differ. "
    f"Source: simulations.benchmarks.grade_thresholds, images 100 to 109 of each set."
)


MEASURES = "Several measures may find the same original, so the shares of a row do not add up."
