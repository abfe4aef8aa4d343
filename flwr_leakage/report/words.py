"""Small texts that several parts of the page share."""

from collections import Counter
from collections.abc import Sequence

from flwr_leakage.report.grades import GRADES, Grade
from flwr_leakage.report.index import count

RANKED = (
    "Leaks are ranked by grade first, then by PSNR: structure (SSIM) can raise a grade, so that a "
    "worse leak may have fewer decibels."
)
"""For each table and gallery that ranks leaks."""


def several(numbers: Sequence[int], noun: str = "client", limit: int = 8) -> str:
    """Name clients or rounds by their numbers.

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


def graded(tally: Counter[Grade], skip_none: bool = True) -> str:
    """Write a tally of grades.

    Example:
        >>> graded(Counter({"exact": 2, "nothing": 1}))
        '2 exact, 1 nothing'
    """
    shown = [name for name in GRADES if tally[name] or not skip_none]
    return ", ".join(f"{tally[name]:,} {name}" for name in shown)


def without_weights(reasons: Sequence[str], absent: int, whole: int) -> str:
    """Why LPIPS is missing, in plain words; empty where it is not for want of its weights.

    The message of the metric names a folder and an error of the system, which say nothing here.

    Example:
        >>> without_weights(["no trained backbone is at hand (download is off)"], 3, 3)
        'LPIPS was not measured: its weights are not at hand.'
    """
    if not reasons or not all("no trained backbone is at hand" in why for why in reasons):
        return ""
    fetched = any("could not be fetched" in why for why in reasons)
    why = "could not be fetched (no network)" if fetched else "are not at hand"
    some = f" on {absent} of {whole} images" if absent < whole else ""
    return f"LPIPS was not measured{some}: its weights {why}."
