"""Inline SVG whose colours are those of the page, and what all charts share.

Matplotlib draws with stand-in colours that are then replaced by the page's CSS variables, so a
chart follows light, dark and print. No text from a run enters a chart: names and units stand in
the captions, which HTML escapes.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flwr_leakage.report.index import number

MAX_DOTS_A_ROUND = 200
MAX_DOTS = 1500
_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--accent)",
    "#050505": "var(--leak)",
}
INK, MUTED, RULE, ACCENT, LEAK = _COLOURS
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": MUTED,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
}


def new_figure() -> tuple[Figure, Axes]:
    """A small chart with one pair of axes, on the page's own ground."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def draw_dots(axes: Axes, by_round: Mapping[int, Sequence[float]], **style: Any) -> None:
    """Every value of each round, as one collection: one a round would take most of the time."""
    places, heights = [], []
    for server_round, values in sorted(by_round.items()):
        dots = thin_out(values, MAX_DOTS_A_ROUND)
        places.append(server_round + spread(len(dots)))
        heights.append(np.asarray(dots))
    axes.scatter(np.concatenate(places), np.concatenate(heights), **style)


def draw_medians(axes: Axes, by_round: Mapping[int, Sequence[float]], **style: Any) -> None:
    """A line through the median of each round."""
    rounds = sorted(by_round)
    axes.plot(rounds, [float(np.median(by_round[r])) for r in rounds], **style)


def whole_rounds(axes: Axes, rounds: Sequence[int]) -> None:
    """Ticks at whole rounds only."""
    if len(rounds) <= 8:
        axes.set_xticks(list(rounds))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def log_scale_if_wide(axes: Axes, side: str, values: Sequence[float]) -> None:
    """A logarithmic axis where positive values spread over a factor of 50."""
    if min(values) > 0 and max(values) / min(values) > 50:
        axes.set(**{f"{side}scale": "log"})
        axis = axes.xaxis if side == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: number(value, 1).removeprefix("1 × "))
        )
        axis.set_minor_formatter(NullFormatter())


def plain(text: str) -> str:
    """A unit as it may stand in a drawing: short, of letters, digits and a few signs."""
    return re.sub(r"[^\w ²·/%().-]", "", text)[:40] if text not in ("", "1") else ""


def thin_out(values: Sequence[float], limit: int) -> list[float]:
    """Return at most ``limit`` of the sorted values, evenly by rank, both ends included.

    Example:
        >>> thin_out([3.0, 1.0, 2.0, 5.0, 4.0], 3)
        [1.0, 3.0, 5.0]
    """
    ordered = sorted(values)
    if len(ordered) <= limit:
        return ordered
    return [ordered[i] for i in np.linspace(0, len(ordered) - 1, limit).round().astype(int)]


def spread(amount: int) -> np.ndarray:
    """Offsets to the side that keep dots apart: van der Corput's sequence in ±0.18."""
    bits = [int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, amount + 1)]
    return (np.array(bits) - 0.5) * 0.36 if amount > 1 else np.zeros(amount)


def inline(figure: Figure, name: str, description: str) -> Markup:
    """The figure as SVG in the page's colours, with ids of its own and a text for the blind."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Matplotlib's style sheet would hold for the whole page; the page's own has its two rules.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for stand_in, variable in _COLOURS.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None
    opening = (
        f'<svg role="img" aria-label="{escape(description)}" '
        f'viewBox="0 0 {size[1]} {size[2]}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return Markup(opening + svg[svg.index(">") + 1 :])
