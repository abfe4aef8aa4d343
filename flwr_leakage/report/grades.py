"""What a reconstruction shows, in four grades that compare it with a blind guess.

A decibel by itself says little: a grey image has 12 dB on CIFAR-10. So every reconstruction is
compared with the *blind guess*, what the server could guess of the sample without its update: in
a simulation the mean image of its own test set, else the mean colour of the normalisation. The
thresholds of the two middle grades are measured by ``simulations/benchmarks/grade_thresholds.py``:
three judges look for the original among 100 other images, by squared error, SSIM and LPIPS. The
thresholds, with their reasons:

- ``exact``: PSNR ≥ 48.1 dB = 20·log₁₀ 255: the error is at most one grey level of 255 (root mean
  square), so that the two files look the same on any screen.
- ``recognisable``: 5 dB nearer than the blind guess (a third of its squared error), or SSIM at
  least 0.5 above the blind guess'. From there on each judge of another kind than the threshold is
  right at least every second time, at that very margin (4.9 dB and 0.50); a guess is right once in
  101. PSNR alone would miss faint but plain digits.
- ``partly``: 1.5 dB nearer, or SSIM at least 0.15 above. LPIPS, the judge that comes nearest to
  people, is right there on about one in four, below on one in fifty.
- ``nothing``: the rest, and whatever is 3 dB or more *farther* than the blind guess (twice its
  squared error), however it is structured.

LPIPS, where a backbone is there, can raise ``partly`` to ``recognisable``: at most 0.1.
"""

import math
from typing import Literal

Grade = Literal["exact", "recognisable", "partly", "nothing"]
GRADES: tuple[Grade, ...] = ("exact", "recognisable", "partly", "nothing")

EXACT_DB = 20 * math.log10(255)
RECOGNISABLE_DB, RECOGNISABLE_SSIM, RECOGNISABLE_LPIPS = 5.0, 0.5, 0.1
PARTLY_DB, PARTLY_SSIM = 1.5, 0.15
NOTHING_DB = -3.0


def grade(
    psnr: float | None,
    blind_psnr: float | None,
    ssim: float | None = None,
    blind_ssim: float | None = None,
    lpips: float | None = None,
) -> Grade | None:
    """The grade of one reconstruction.

    Args:
        psnr: of the reconstruction, dB; ``None`` where the attack gave none.
        blind_psnr: of the blind guess for the same sample, dB.
        ssim: of the reconstruction.
        blind_ssim: of the blind guess.
        lpips: of the reconstruction.

    Returns:
        The grade; ``None`` where there is no reconstruction, or no blind guess to compare with.

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


def decided_by(
    psnr: float | None,
    blind_psnr: float | None,
    ssim: float | None = None,
    blind_ssim: float | None = None,
    lpips: float | None = None,
) -> str:
    """What decided the grade where PSNR alone would have given another one; else empty.

    Example:
        >>> decided_by(13.0, 12.0, ssim=0.7, blind_ssim=0.1), decided_by(20.0, 12.0, ssim=0.7)
        ('by SSIM 0.70 (blind 0.10)', '')
    """
    given = grade(psnr, blind_psnr, ssim, blind_ssim, lpips)
    if given == grade(psnr, blind_psnr):
        return ""
    if given == grade(psnr, blind_psnr, ssim, blind_ssim):
        written = f"by SSIM {ssim:.2f} (blind {blind_ssim:.2f})"
    else:
        written = f"by LPIPS {lpips:.2f}"
    return written.replace("-", "−")
