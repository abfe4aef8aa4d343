"""Accuracy above leakage by client, on one axis of rounds, with the grades as bands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flwr_leakage.report.drawing import (
    ACCENT,
    INK,
    LEAK,
    MAX_DOTS_A_ROUND,
    MUTED,
    STYLE,
    draw_medians,
    inline,
    plain,
    spread,
    whole_rounds,
)
from flwr_leakage.report.grades import EXACT_DB, PARTLY_DB, RECOGNISABLE_DB

MAX_PANELS = 4
"""Clients with a panel of their own; where there are more, one panel holds all."""
MAX_LINES = 3
"""Defenses that are drawn."""
BAND = 5.0
"""Height, in dB, of the band that stands for every PSNR that is exact."""
_DASHES = ((0, (4, 2)), (0, (8, 2)), (0, (4, 2, 1, 2)))
_DOTS: dict[str, tuple[str, str, int]] = {
    "exact": (LEAK, "D", 20),
    "recognisable": (LEAK, "o", 24),
    "partly": (LEAK, "^", 24),
    "nothing": (MUTED, "o", 12),
    "": (MUTED, "s", 10),
}
"""Colour, marker and size of each grade."""


class Dot(NamedTuple):
    """One image in one round.

    Attributes:
        psnr: in dB.
        grade: empty where it cannot be told.
        ended: whether the time limit ended the attack: drawn hollow.
    """

    psnr: float
    grade: str
    ended: bool = False


@dataclass(frozen=True)
class Panel:
    """What became of one client's images, or of all.

    Attributes:
        client: its number; ``None`` for all clients, −1 for the aggregate.
        dots: of each round, every image.
        under: by the name of a defense, PSNR in dB of each round under it; at most ``MAX_LINES``.
        blind: PSNR of the blind guess for the same images by round, or empty.
    """

    client: int | None
    dots: Mapping[int, Sequence[Dot]]
    under: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    blind: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Whose images, in words."""
        return "all clients" if self.client is None or self.client < 0 else f"client {self.client}"

    @property
    def values(self) -> list[float]:
        """Every PSNR that is drawn."""
        own = [dot.psnr for dots in self.dots.values() for dot in dots]
        others = (*self.under.values(), self.blind)
        return own + [v for by_round in others for values in by_round.values() for v in values]


def story_chart(
    accuracy: Mapping[int, Sequence[float]], panels: Sequence[Panel], name: str, description: str
) -> Markup:
    """Draw accuracy above the leakage of each client.

    Each client has a scale of PSNR of its own, which ends where *exact* begins: all that is above
    lies in one band.

    Args:
        accuracy: test accuracy in [0, 1] by round, or empty.
        panels: at least one, each with at least one dot.
        name: makes the ids of this chart unique on the page.
        description: what the chart shows, for a reader who does not see it.
    """
    with matplotlib.rc_context({**STYLE, "font.size": 9, "svg.hashsalt": name}):
        heights = [1.3] * bool(accuracy) + [2.0 if len(panels) < 3 else 1.5] * len(panels)
        figure = Figure(figsize=(4.4, sum(heights) + 0.8), layout="constrained")
        figure.patch.set_alpha(0)
        grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        axes = [row[0] for row in grid]
        for each in axes:
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
            handles=_legend(panels), loc="outside upper left", ncols=2, frameon=False,
            handlelength=2.2, columnspacing=1.2, borderaxespad=0.2,
        )  # fmt: skip
        return inline(figure, name, description)


def _top(panel: Panel) -> float:
    """The upper end of a panel: with the band where something is exact."""
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
    """Everything that is exact is drawn in the middle of its band."""
    return EXACT_DB + BAND / 2 if psnr >= EXACT_DB else psnr


def _draw(panel: Panel, axes: Axes) -> None:
    low, top = min(0.0, *panel.values), _top(panel)
    axes.set_ylim(low, top)
    step = 5 if top - low < 30 else 10
    axes.set_yticks([tick for tick in range(-100, 48, step) if low <= tick < top])
    axes.set_ylabel(f"{panel.title}\nPSNR, dB")
    _bands(panel, axes, low, top)
    if panel.blind:
        draw_medians(axes, panel.blind, color=INK, lw=1.2, ls=(0, (1, 2)), marker="_", ms=12)
    for style, marker, by_round in zip(_DASHES, "svP", panel.under.values(), strict=False):
        draw_medians(axes, _capped(by_round), color=ACCENT, lw=1.4, ls=style, marker=marker, ms=4)
    own = {r: [dot.psnr for dot in dots] for r, dots in panel.dots.items()}
    draw_medians(axes, _capped(own), color=LEAK, lw=1.4)
    places: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for server_round, dots in sorted(panel.dots.items()):
        ordered = sorted(dots)
        kept = np.linspace(0, len(dots) - 1, min(len(dots), MAX_DOTS_A_ROUND)).round()
        shown = [ordered[int(place)] for place in kept]
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
    """The grades that PSNR alone gives, counted from the median blind guess."""
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
        line(f"graded {grade}" if grade else "without a grade", color=colour,
             marker=marker, ms=size**0.5, lw=0)
        for grade, (colour, marker, size) in _DOTS.items() if grade in grades
    ]  # fmt: skip
    if any(dot.ended and dot.grade for dot in dots):
        found.append(line("hollow: cut off by time", mec=LEAK, mfc="none", marker="o", ms=5, lw=0))
    found.append(line("median", color=LEAK, lw=1.4))
    names = list(dict.fromkeys(name for panel in panels for name in panel.under))
    for style, marker, name in zip(_DASHES, "svP", names, strict=False):
        found.append(line(f"median if {plain(name)}", color=ACCENT, lw=1.4, ls=style,
                          marker=marker, ms=4))  # fmt: skip
    if any(panel.blind for panel in panels):
        found.append(line("blind guess, median", color=INK, lw=1.2, ls=(0, (1, 2))))
    return found
