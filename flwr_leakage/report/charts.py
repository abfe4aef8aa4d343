"""Charts of one quantity: over the rounds, against another one, and between bounds."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from flwr_leakage.report.drawing import (
    ACCENT,
    INK,
    LEAK,
    MAX_DOTS,
    MUTED,
    STYLE,
    draw_dots,
    inline,
    log_scale_if_wide,
    new_figure,
    plain,
    whole_rounds,
)


def rounds_chart(
    by_round: Mapping[int, Sequence[float]], name: str, description: str, unit: str = ""
) -> Markup:
    """Draw the values of each round as dots, with a line through their medians.

    Args:
        by_round: the values of each round; not empty.
        name: makes the ids of this chart unique on the page.
        description: what the chart shows, for a reader who does not see it.
        unit: of the vertical axis. Only plain letters of it are drawn.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure, axes = new_figure()
        rounds = sorted(by_round)
        several = any(len(by_round[server_round]) > 1 for server_round in rounds)
        if several:
            draw_dots(axes, by_round, s=9, color=ACCENT, alpha=0.4, lw=0)
        medians = [float(np.median(by_round[server_round])) for server_round in rounds]
        axes.plot(
            rounds, medians, color=ACCENT, lw=1.8, marker="o", ms=4, label="median of samples"
        )
        log_scale_if_wide(axes, "y", [value for group in by_round.values() for value in group])
        axes.set_xlabel("round of training")
        axes.set_ylabel(plain(unit) or "value, without unit")
        if unit == "%":
            axes.set(ylim=(0, 100), yticks=range(0, 101, 25))
        axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        whole_rounds(axes, rounds)
        if several:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                        borderaxespad=0.2, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        return inline(figure, name, description)


def scatter_chart(
    pairs: Sequence[tuple[float, float]],
    name: str,
    description: str,
    unit: str = "",
    blind: float | None = None,
) -> Markup:
    """Draw one dot a sample: the score to the right, the outcome, in its unit, upwards.

    What the blind guess reaches is drawn as a line, where it is known.

    Of more than ``MAX_DOTS`` pairs, only every second, third, … is drawn.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name, "axes.grid.axis": "both"}):
        figure, axes = new_figure()
        shown = pairs[:: max(1, math.ceil(len(pairs) / MAX_DOTS))]
        left, right = np.asarray(shown, dtype=float).T
        axes.scatter(left, right, s=14, color=ACCENT, alpha=0.55, lw=0)
        if blind is not None:
            axes.axhline(blind, color=INK, lw=1.2, ls=(0, (1, 2)), label="blind guess, median")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)
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
    """Draw what the attack reached on each sample as a dot, and the limits above it as lines.

    Args:
        reached: PSNR of the attack on each sample, in dB, in the order of drawing.
        limits: by what they are called, the highest PSNR that each lets an attacker have.
        name: makes the ids of this chart unique on the page.
        description: what the chart shows, for a reader who does not see it.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
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
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                    borderaxespad=0.2, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        return inline(figure, name, description)
