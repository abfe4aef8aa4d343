"""Draw the share of members that a test finds against its rate of false alarms, on log axes."""

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, NullFormatter

from flwr_leakage.report.drawing import ACCENT, LEGEND, MUTED, STYLE, inline, new_figure
from flwr_leakage.report.figures import Chart
from flwr_leakage.report.index import Index, count
from flwr_leakage.report.membership import tested_pairs

FEWEST = 20
"""The least number of tests of records that were not in the tested update. With fewer, no curve is
drawn, as rates of false alarms below 1/20 could not be told.
"""


def found_by_rate(members: list[float], others: list[float]) -> list[tuple[float, float]]:
    """Return (rate k/n of false alarms, share of members found) for k = 1 … n − 1.

    ``members`` and ``others`` are p-values, those of n others, which are no members. A member is
    found if its p-value is below the (k + 1)-th smallest of the others.

    Example:
        >>> found_by_rate([0.01, 0.3], [0.2, 0.5, 0.6, 0.9])
        [(0.25, 1.0), (0.5, 1.0), (0.75, 1.0)]
    """
    ordered, size = sorted(others), len(others)
    return [(k / size, sum(p < ordered[k] for p in members) / len(members)) for k in range(1, size)]


def membership_curve(index: Index) -> Chart | None:
    """Return the chart of members found against false alarms, for a run whose truth is known.

    The result is ``None`` without tests of members, or with fewer than 20 tests of others.
    """
    members, others = tested_pairs(index)
    if not members or len(others) < FEWEST:
        return None
    caption = (
        f"Of {count(len(members), 'test')} of a record that was in the update, the share that is "
        f"found, by the rate of false alarms among {count(len(others), 'test')} of one that was "
        f"not. A test that knows nothing stays on the dashed line."
    )
    return Chart("Members found, by the rate of false alarms", caption, _draw(members, others))


def _draw(members: list[float], others: list[float]) -> Markup:
    points = found_by_rate(members, others)
    lowest = min(1 / len(others), 1 / len(members))
    name = "members-curve"
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure, axes = new_figure()
        rates, shares = zip(*points, strict=True)
        axes.plot([lowest, 1], [lowest, 1], color=MUTED, lw=1, ls=(0, (4, 2)), label="chance")
        heights = [max(share, lowest) for share in shares]
        axes.step(rates, heights, where="post", color=ACCENT, lw=1.8, label="this test")
        axes.set(xscale="log", yscale="log", xlim=(1 / len(others), 1), ylim=(lowest, 1.1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("false alarms")
        axes.set_ylabel("members found")
        axes.legend(**LEGEND)
        told = f"The share of members found rises from {shares[0]:.0%} at a rate of {rates[0]:.2%}."
        return inline(figure, name, told)
