"""Plot accuracy over leakage, and join the groups of runs that no other group beats in both."""

from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from flwr_leakage.comparison.compare import Comparison, Group
from flwr_leakage.comparison.outcome import MEASURES

MAX_LEGEND, MAX_LABEL = 40, 120
"""The largest number of groups that the legend names, and the largest number of characters of a
name. The picture grows with both.
"""


def frontier(
    comparison: Comparison,
    leakage: str = "psnr_best",
    narrow: bool = False,
    numbered: bool = False,
) -> Figure:
    """Return a Matplotlib figure of test accuracy over leakage, a point and a range for each group
    of runs.

    The range is over the group's seeds. A line, the frontier, joins the groups that no other group
    beats in leakage or accuracy without being worse in the other of the two.

    Args:
        comparison: the comparison, in which at least one group has both a leakage and an accuracy.
        leakage: the name of a measure of ``MEASURES`` whose larger values leak more.
        narrow: whether the figure is for a phone: half as wide, with the legend below.
        numbered: whether the legend shows the groups' numbers, from 1, in place of their names.

    Raises:
        ValueError: ``leakage`` is no such measure, or no group has both a leakage and an accuracy.
    """
    kinds = {measure.name: measure for measure in MEASURES if measure.leaks == "more"}
    if leakage not in kinds:
        raise ValueError(f"leakage must be one of {sorted(kinds)}, got {leakage!r}.")
    points = [
        (leaked, accuracy, group)
        for group in comparison.groups
        if (leaked := group.mean(leakage)) is not None
        and (accuracy := group.mean("test_accuracy")) is not None
    ]
    if not points:
        raise ValueError(f"no group has both {leakage} and test_accuracy; nothing can be drawn.")
    with matplotlib.rc_context({"text.parse_math": False}):
        size = (4.0, 4.2 + 0.25 * min(len(points), MAX_LEGEND)) if narrow else (8.0, 4.2)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        best = sorted(_undominated(points), key=lambda point: point[:2])
        axes.plot([p[0] for p in best], [100 * p[1] for p in best], color="0.6", zorder=1)
        for number, (leaked, accuracy, group) in enumerate(points):
            place = comparison.groups.index(group) + 1
            name = str(place) if numbered else " ".join(group.name.split())[:MAX_LABEL]
            axes.errorbar(
                leaked,
                100 * accuracy,
                xerr=_range(group.known(leakage)),
                yerr=_range([100 * share for share in group.known("test_accuracy")]),
                fmt="os^Dv<>ph*"[number % 10],
                color=f"C{number % 10}",
                capsize=3,
                label=name if number < MAX_LEGEND else None,
            )
        axes.set_xlabel(f"{kinds[leakage].heading} (further left: less leaks)")
        axes.set_ylabel("test accuracy after the last round, %")
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        if narrow:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(-0.1, -0.15))
        else:
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _undominated(points: list[tuple[float, float, Group]]) -> list[tuple[float, float, Group]]:
    """Return the (leakage, accuracy, group) points that no other point dominates.

    A point dominates another if its leakage is at most as large, its accuracy is at least as large,
    and one of the two differs.
    """
    return [
        p
        for p in points
        if not any(q[0] <= p[0] and q[1] >= p[1] and (q[0] < p[0] or q[1] > p[1]) for q in points)
    ]


def _range(numbers: list[float]) -> list[list[float]] | None:
    """Return how far the lowest and the highest number lie from the mean, as lengths of error bars.

    The result is ``[[below], [above]]``, or ``None`` for fewer than two numbers.
    """
    if len(numbers) < 2:
        return None
    mean = fmean(numbers)
    # Rounding of the mean must not make a length negative.
    return [[max(mean - min(numbers), 0.0)], [max(max(numbers) - mean, 0.0)]]
