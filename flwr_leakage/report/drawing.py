"""Draw the report's charts as inline SVG in the colours of the page.

Matplotlib draws with stand-in colours that are then replaced by the page's CSS variables, so a
chart follows light, dark and print. Of a run's texts, only units and names of defenses enter a
chart, after :func:`plain` has cut them to harmless characters.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flwr_leakage.report.grades import EXACT_DB, PARTLY_DB, RECOGNISABLE_DB
from flwr_leakage.report.index import number

D = TypeVar("D", float, "Dot")
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


MAX_PANELS = 4
"""The largest number of clients that have a panel of the chart each, a choice of layout. If there
are more, one panel holds all clients.
"""


MAX_LINES = 3
"""The largest number of additional defenses whose medians a chart shows, a choice of layout."""


BAND = 5.0
"""The height, in dB, of the band at the top of a chart for all PSNRs of the grade ``exact``, a
choice of layout.
"""


_DASHES = ((0, (4, 2)), (0, (8, 2)), (0, (4, 2, 1, 2)))


_DOTS: dict[str, tuple[str, str, int]] = {
    "exact": (LEAK, "D", 20),
    "recognisable": (LEAK, "o", 24),
    "partly": (LEAK, "^", 24),
    "nothing": (MUTED, "s", 12),
    "": (MUTED, "X", 16),
}
"""The colour, marker and size of the dots for each grade; the empty text stands for no grade."""


class Dot(NamedTuple):
    """The dot of a chart for one image in one round.

    Attributes:
        psnr: the PSNR of the reconstruction in dB.
        grade: the grade of the reconstruction; empty if there is none.
        ended: whether the time limit ended the attack, which makes the dot hollow.
    """

    psnr: float
    grade: str
    ended: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart of the page: the PSNR of one client's images, or of all clients', over the rounds.

    Attributes:
        client: the number of the client; ``None`` for all clients, −1 for the mean of all updates.
        dots: a dot for every image, by round.
        under: PSNR values in dB from copies of the updates, by their defense and by round; at most
            three defenses.
        blind: the PSNR in dB of guesses of the images without the update, by round; empty if there
            are none.
        ended: by defense, the rounds in which the time limit ended an attack, whose markers are
            hollow.
    """

    client: int | None
    dots: Mapping[int, Sequence[Dot]]
    under: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    blind: Mapping[int, Sequence[float]] = field(default_factory=dict)
    ended: Mapping[str, Set[int]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return words for the clients whose images the panel shows."""
        own = self.client is not None and self.client >= 0
        return f"client {self.client}" if own else "attacked images"

    @property
    def values(self) -> list[float]:
        """Return every PSNR in dB that the panel draws."""
        own = [dot.psnr for dots in self.dots.values() for dot in dots]
        others = (*self.under.values(), self.blind)
        return own + [v for by_round in others for values in by_round.values() for v in values]


def story_chart(
    accuracy: Mapping[int, Sequence[float]],
    panels: Sequence[Panel],
    name: str,
    description: str,
    is_wide: bool = False,
) -> Markup:
    """Return a chart of test accuracy above panels of PSNR, over the rounds.

    Args:
        accuracy: the values in [0, 1] that were recorded in each round, of which the median is
            drawn; may be empty.
        panels: the panels, each with at least one dot and its own scale of PSNR. A band on top
            holds all exact images.
        name: a prefix of the SVG's ids.
        description: a text for screen readers.
        is_wide: whether the chart fills a screen's width, not a phone's.
    """
    with matplotlib.rc_context({**STYLE, "font.size": 9}):
        heights = [1.3] * bool(accuracy) + [2.0 if len(panels) < 3 else 1.5] * len(panels)
        width = 12.0 if is_wide else 4.4
        figure = Figure(figsize=(width, sum(heights) + 0.8), layout="constrained")
        grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        axes = [row[0] for row in grid]
        for each in (figure, *axes):
            each.patch.set_alpha(0)
        rounds = sorted({*accuracy, *(r for panel in panels for r in panel.dots)})
        if accuracy:
            known = sorted(accuracy)
            shares = [100 * float(np.median(accuracy[r])) for r in known]
            mark = "o" if len(known) < 30 else ""
            axes[0].plot(known, shares, color=INK, lw=1.8, marker=mark, ms=4)
            axes[0].set(ylim=(0, 100), yticks=range(0, 101, 25), ylabel="accuracy, %")
        for panel, each in zip(panels, axes[bool(accuracy) :], strict=True):
            _draw(panel, each)
        axes[-1].set_xlabel("round of training")
        axes[-1].set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        whole_rounds(axes[-1], rounds)
        figure.legend(
            handles=_legend(panels), loc="outside upper left", ncols=6 if is_wide else 2,
            frameon=False, handlelength=2.2, columnspacing=1.2, borderaxespad=0.2,
        )  # fmt: skip
        return inline(figure, name, description)


def _top(panel: Panel) -> float:
    """Return the upper end of a panel's scale in dB, with a band on top for exact images."""
    highest = max(panel.values)
    if highest >= EXACT_DB:
        return EXACT_DB + BAND
    threshold = _blind(panel) + RECOGNISABLE_DB + 3 if panel.blind else 1.0
    return min(EXACT_DB, max(1.05 * highest, threshold))


def _blind(panel: Panel) -> float:
    return float(np.median([value for values in panel.blind.values() for value in values]))


def _capped(by_round: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    return {r: [_cap(value) for value in values] for r, values in by_round.items()}


def _cap(psnr: float) -> float:
    """Return the height in dB at which a PSNR is drawn; all exact images share one height."""
    return EXACT_DB + BAND / 2 if psnr >= EXACT_DB else psnr


def _draw(panel: Panel, axes: Axes) -> None:
    low, top = min(0.0, *panel.values), _top(panel)
    axes.set_ylim(low, top)
    step = 5 if top - low < 30 else 10
    axes.set_yticks([tick for tick in range(-100, 48, step) if low <= tick < top])
    axes.set_ylabel(f"{panel.title}\nPSNR, dB")
    _bands(panel, axes, low, top)
    if panel.blind:
        (first, *_), dotted = panel.blind, (0, (1, 2))
        if len(panel.blind) == 1:  # a line through a single point would not show
            ends, level = [first - 0.25, first + 0.25], _blind(panel)
            axes.plot(ends, [level, level], color=INK, lw=1.2, ls=dotted)
        draw_medians(axes, panel.blind, color=INK, lw=1.2, ls=dotted)
    for style, marker, (name, by_round) in zip(_DASHES, "svP", panel.under.items(), strict=False):
        draw_medians(axes, _capped(by_round), color=ACCENT, lw=1.4, ls=style)
        for over in (False, True):
            cut = panel.ended.get(name, frozenset())
            marked = {r: held for r, held in by_round.items() if (r in cut) == over}
            draw_medians(axes, _capped(marked), color=ACCENT, lw=0, marker=marker, ms=4,
                         mfc="none" if over else ACCENT)  # fmt: skip
    own = {r: [dot.psnr for dot in dots] for r, dots in panel.dots.items()}
    draw_medians(axes, _capped(own), color=LEAK, lw=1.4)
    places: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for server_round, dots in sorted(panel.dots.items()):
        shown = thin_out(dots, MAX_DOTS_A_ROUND)
        for offset, dot in zip(spread(len(shown)), shown, strict=True):
            kind = (dot.grade, dot.ended)
            places.setdefault(kind, []).append((server_round + offset, _cap(dot.psnr)))
    for (grade, ended), found in sorted(places.items()):
        colour, marker, size = _DOTS[grade]
        face = "none" if ended and grade else colour
        across, up = np.asarray(found).T
        axes.scatter(across, up, zorder=3, marker=marker, s=size, facecolors=face,
                     edgecolors=colour, lw=1.1)  # fmt: skip


def _bands(panel: Panel, axes: Axes, low: float, top: float) -> None:
    """Draw a band for the PSNRs of each grade, on a scale from ``low`` to ``top`` dB.

    Except for ``exact``, limits lie at fixed distances from the median PSNR of the blind guess.
    """
    edges = [("exact", EXACT_DB, top, 0.22)] if top > EXACT_DB else []
    if panel.blind:
        blind = _blind(panel)
        partly, recognisable = blind + PARTLY_DB, blind + RECOGNISABLE_DB
        below = min(top, EXACT_DB)
        edges += [
            ("recognisable", recognisable, below, 0.12),
            ("partly", partly, recognisable, 0.05),
            ("nothing", low, min(partly, below), 0.0),
        ]
    for name, lower, upper, alpha in edges:
        if upper <= lower:
            continue
        axes.axhspan(lower, upper, color=LEAK, alpha=alpha, lw=0, zorder=0)
        axes.text(1.01, (lower + upper) / 2, name, transform=axes.get_yaxis_transform(),
                  va="center", ha="left", color=MUTED)  # fmt: skip


def _legend(panels: Sequence[Panel]) -> list[Line2D]:
    def line(label: str, **style: Any) -> Line2D:
        return Line2D([], [], label=label, **style)

    dots = [dot for panel in panels for each in panel.dots.values() for dot in each]
    grades = {dot.grade for dot in dots}
    found = [
        line(f"graded {grade}" if grade else "without a grade", mec=colour,
             mfc=colour, marker=marker, ms=size**0.5, lw=0)
        for grade, (colour, marker, size) in _DOTS.items() if grade in grades
    ]  # fmt: skip
    medians = any(rounds for panel in panels for rounds in panel.ended.values())
    hollow = [_DOTS[dot.grade][1] for dot in dots if dot.ended and dot.grade] or ["s"] * medians
    if hollow:
        found.append(
            line("hollow: cut off by time", mec=MUTED, mfc="none", marker=hollow[0], ms=5, lw=0)
        )
    if any(len(panel.dots) > 1 for panel in panels):
        found.append(line("median", color=LEAK, lw=1.4))
    names = list(dict.fromkeys(name for panel in panels for name in panel.under))
    for style, marker, name in zip(_DASHES, "svP", names, strict=False):
        found.append(line(f"median if {plain(name)}", color=ACCENT, lw=1.4, ls=style,
                          marker=marker, ms=4))  # fmt: skip
    if any(panel.blind for panel in panels):
        found.append(line("blind guess, median", color=INK, lw=1.2, ls=(0, (1, 2))))
    return found


def rounds_chart(
    by_round: Mapping[int, Sequence[float]], name: str, description: str, unit: str = ""
) -> Markup:
    """Return a chart of the values ``by_round`` as dots, with a line through each round's median.

    ``name`` is a prefix of the SVG's ids, ``description`` a text for screen readers, and ``unit``
    the unit of the vertical axis.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure()
        rounds = sorted(by_round)
        several = any(len(values) > 1 for values in by_round.values())
        if several:
            shown = {r: thin_out(by_round[r], MAX_DOTS_A_ROUND) for r in rounds}
            across = np.concatenate([r + spread(len(dots)) for r, dots in shown.items()])
            up = np.concatenate(list(shown.values()))
            axes.scatter(across, up, s=9, color=ACCENT, alpha=0.4, lw=0)
        style: Any = {"color": ACCENT, "lw": 1.8, "marker": "o", "ms": 4}
        draw_medians(axes, by_round, **style, label="median of samples")
        log_scale_if_wide(axes, "y", [value for group in by_round.values() for value in group])
        axes.set_xlabel("round of training")
        axes.set_ylabel(plain(unit) or "value, without unit")
        if unit == "%":
            axes.set(ylim=(0, 100), yticks=range(0, 101, 25))
        axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        whole_rounds(axes, rounds)
        if several:
            axes.legend(**LEGEND, **COLUMNS)
        return inline(figure, name, description)


def scatter_chart(
    pairs: Sequence[tuple[float, float]],
    name: str,
    description: str,
    unit: str = "",
    blind: float | None = None,
) -> Markup:
    """Return a scatter plot of (score, outcome) pairs, one dot a sample, at most 1500.

    ``name`` is a prefix of the SVG's ids, ``description`` a text for screen readers, and ``unit``
    the name of the vertical axis. A line shows ``blind``, the outcome of a guess without the
    update, unless it is ``None``.
    """
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure, axes = new_figure()
        shown = pairs[:: max(1, math.ceil(len(pairs) / MAX_DOTS))]
        left, right = np.asarray(shown, dtype=float).T
        axes.scatter(left, right, s=14, color=ACCENT, alpha=0.55, lw=0)
        if blind is not None:
            axes.axhline(blind, color=INK, lw=1.2, ls=(0, (1, 2)), label="blind guess, median")
            axes.legend(**LEGEND)
        log_scale_if_wide(axes, "x", list(left))
        axes.set_xlabel("risk score")
        axes.set_ylabel(plain(unit) or "outcome")
        return inline(figure, name, description)


def corridor_chart(
    reached: Sequence[float],
    limits: Mapping[str, Sequence[float | None]],
    name: str,
    description: str,
) -> Markup:
    """Return a chart of the attack's PSNR in dB on each sample, and of bounds on it.

    Args:
        reached: the PSNR of the attack on each sample, drawn as dots.
        limits: by a bound's name, the bound on each sample's PSNR, drawn as a line; ``None`` for
            samples without it.
        name: a prefix of the SVG's ids.
        description: a text for screen readers.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure()
        places = np.arange(1, len(reached) + 1)
        for (limit, psnr), (colour, dashes) in zip(
            limits.items(), ((LEAK, (0, ())), (INK, (0, (4, 2)))), strict=False
        ):
            line = np.asarray([np.nan if value is None else value for value in psnr], dtype=float)
            axes.plot(places, line, color=colour, lw=1.4, ls=dashes, label=limit)
            axes.fill_between(
                places, reached, line, where=line >= reached, color=MUTED, alpha=0.12, lw=0
            )
        axes.scatter(places, reached, s=12, color=ACCENT, lw=0, zorder=3, label="attack")
        axes.set_xlabel("sample, least protected first")
        axes.set_ylabel("PSNR")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.legend(**LEGEND, **COLUMNS)
        return inline(figure, name, description)


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


LEGEND: Any = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "frameon": False,
    "borderaxespad": 0.2,
}
COLUMNS: Any = {"ncols": 3, "handlelength": 1.6, "columnspacing": 1.2}


def new_figure() -> tuple[Figure, Axes]:
    """Return a small Matplotlib figure with one pair of axes and a transparent background."""
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def draw_medians(axes: Axes, by_round: Mapping[int, Sequence[float]], **style: Any) -> None:
    """Draw a line through the medians of each round's values, in Matplotlib's ``style``."""
    rounds = sorted(by_round)
    axes.plot(rounds, [float(np.median(by_round[r])) for r in rounds], **style)


def whole_rounds(axes: Axes, rounds: Sequence[int]) -> None:
    """Set the ticks of the horizontal axis at whole rounds only."""
    if len(rounds) <= 8:
        axes.set_xticks(list(rounds))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def log_scale_if_wide(axes: Axes, side: str, values: Sequence[float]) -> None:
    """Make the axis ``side`` (``x`` or ``y``) logarithmic if its values are positive and far apart.

    Far apart is more than a factor of 50 between the largest and the least.
    """
    if min(values) > 0 and max(values) / min(values) > 50:
        axes.set(**{f"{side}scale": "log"})
        axis = axes.xaxis if side == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: number(value, 1).removeprefix("1 × "))
        )
        axis.set_minor_formatter(NullFormatter())


def plain(text: str) -> str:
    """Return a unit as a chart shows it: cut to a short text of letters, digits and a few signs."""
    return re.sub(r"[^\w ²·/%().-]", "", text)[:40] if text not in ("", "1") else ""


def thin_out(values: Sequence[D], limit: int) -> list[D]:
    """Return at most ``limit`` of the sorted values, spaced evenly by rank, with both extremes.

    Example:
        >>> thin_out([3.0, 1.0, 2.0, 5.0, 4.0], 3)
        [1.0, 3.0, 5.0]
    """
    ordered = sorted(values)
    if len(ordered) <= limit:
        return ordered
    return [ordered[i] for i in np.linspace(0, len(ordered) - 1, limit).round().astype(int)]


def spread(amount: int) -> np.ndarray:
    """Return ``amount`` horizontal offsets within ±0.18 rounds that keep dots of a round apart.

    The offsets follow van der Corput's sequence.
    """
    bits = [int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, amount + 1)]
    return (np.array(bits) - 0.5) * 0.36 if amount > 1 else np.zeros(amount)


def inline(figure: Figure, name: str, description: str) -> Markup:
    """Return a figure as inline SVG in the page's colours.

    ``name`` is a prefix of the SVG's ids, and ``description`` a text for screen readers.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Matplotlib's style sheet is removed, as it would hold for the whole page. Its two rules stand
    # in the page's own style sheet.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    # Matplotlib names a clip path by its coordinates, whose last digits change between drawings. A
    # number replaces each name, so that equal data give an equal page.
    for place, clip in enumerate(dict.fromkeys(re.findall(r"#(p[0-9a-f]{10})\)", svg))):
        svg = svg.replace(clip, f"clip{place}")
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
