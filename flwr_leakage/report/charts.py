"""Charts as inline SVG whose colours are those of the page.

Matplotlib draws with stand-in colours that are then replaced by the page's CSS variables, so a
chart follows light, dark and print. No text from a run enters a chart: names and units stand in
the captions, which HTML escapes.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flwr_leakage.report.index import number

MAX_DOTS_A_ROUND = 200
MAX_DOTS = 1500
MAX_LINES = 3
_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--rule)",
    "#040404": "var(--accent)",
    "#050505": "var(--leak)",
}
_INK, _MUTED, _RULE, _ACCENT, _LEAK = _COLOURS
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _MUTED,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
}


def story_chart(
    accuracy: Mapping[int, Sequence[float]],
    leakage: Mapping[int, Mapping[int, Sequence[float]]],
    blind: Mapping[int, Sequence[float]],
    what_ifs: Mapping[str, Mapping[int, Sequence[float]]],
    name: str,
    description: str,
) -> Markup:
    """Draw accuracy above leakage on one axis of rounds.

    Args:
        accuracy: test accuracy in [0, 1] by round, or empty.
        leakage: PSNR in dB of every reconstruction, by client and round; not empty. Up to
            ``MAX_LINES`` clients have lines of their own, −1 is the aggregate.
        blind: PSNR of the blind guess for the same samples, or empty.
        what_ifs: PSNR under defenses, by their names, of which plain letters are drawn; at most
            ``MAX_LINES``.
        name: makes the ids of this chart unique on the page.
        description: what the chart shows, for a reader who does not see it.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        height = 4.6 if accuracy else 3.0
        figure = Figure(figsize=(7.4, height), layout="constrained")
        figure.patch.set_alpha(0)
        ratios = [2, 3] if accuracy else [1]
        grid = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)
        panels = [row[0] for row in grid]
        for panel in panels:
            panel.patch.set_alpha(0)
        if accuracy:
            rounds = sorted(accuracy)
            shares = [100 * float(np.median(accuracy[r])) for r in rounds]
            panels[0].plot(rounds, shares, color=_INK, lw=1.8, marker="o", ms=4)
            panels[0].set(ylim=(0, 100), yticks=range(0, 101, 25), ylabel="test accuracy, %")
        below = panels[-1]
        pooled: dict[int, list[float]] = {}
        for by_round in leakage.values():
            for server_round, values in by_round.items():
                pooled.setdefault(server_round, []).extend(values)
        _dots(below, pooled, s=12, color=_LEAK, alpha=0.4, lw=0)
        lines = leakage if len(leakage) <= MAX_LINES else {None: pooled}
        for marker, (client, by_round) in zip("o^D", sorted(lines.items()), strict=False):
            named = "all clients" if client is None or client < 0 else f"client {client}"
            _medians(below, by_round, color=_LEAK, lw=1.6, marker=marker, ms=5,
                     label=f"{named}, median")  # fmt: skip
        dashes = ((0, (4, 2)), (0, (8, 2)), (0, (4, 2, 1, 2)))
        for style, marker, (named, under) in zip(dashes, "svP", what_ifs.items(), strict=False):
            _medians(below, under, color=_ACCENT, lw=1.4, ls=style, marker=marker, ms=4,
                     label=f"if {_plain(named)}, median")  # fmt: skip
        if blind:
            _medians(below, blind, color=_INK, lw=1.2, ls=(0, (1, 2)), marker="_", ms=14,
                     label="blind guess, median")  # fmt: skip
        below.set(xlabel="round of training", ylabel="PSNR of images, dB")
        below.set_ylim(0, 1.05 * max(max(values) for values in pooled.values()))
        below.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                     borderaxespad=0.2, handlelength=2.2, columnspacing=1.2)  # fmt: skip
        rounds = sorted({*accuracy, *pooled})
        below.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        _whole_rounds(below, rounds)
        return _inline(figure, name, description)


def _dots(axes: Axes, by_round: Mapping[int, Sequence[float]], **style: Any) -> None:
    """Every value of each round, as one collection: one a round would take most of the time."""
    places, heights = [], []
    for server_round, values in sorted(by_round.items()):
        dots = thin_out(values, MAX_DOTS_A_ROUND)
        places.append(server_round + _spread(len(dots)))
        heights.append(np.asarray(dots))
    axes.scatter(np.concatenate(places), np.concatenate(heights), **style)


def _medians(axes: Axes, by_round: Mapping[int, Sequence[float]], **style: Any) -> None:
    rounds = sorted(by_round)
    axes.plot(rounds, [float(np.median(by_round[r])) for r in rounds], **style)


def _whole_rounds(axes: Axes, rounds: Sequence[int]) -> None:
    if len(rounds) <= 8:
        axes.set_xticks(list(rounds))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


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
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure()
        rounds = sorted(by_round)
        several = any(len(by_round[server_round]) > 1 for server_round in rounds)
        if several:
            _dots(axes, by_round, s=9, color=_ACCENT, alpha=0.4, lw=0)
        medians = [float(np.median(by_round[server_round])) for server_round in rounds]
        axes.plot(
            rounds, medians, color=_ACCENT, lw=1.8, marker="o", ms=4, label="median of samples"
        )
        _log_scale_if_wide(axes, "y", [value for group in by_round.values() for value in group])
        axes.set_xlabel("round of training")
        axes.set_ylabel(_plain(unit) or "value, without unit")
        if unit == "%":
            axes.set(ylim=(0, 100), yticks=range(0, 101, 25))
        axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
        _whole_rounds(axes, rounds)
        if several:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                        borderaxespad=0.2, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        return _inline(figure, name, description)


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
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name, "axes.grid.axis": "both"}):
        figure, axes = _figure()
        shown = pairs[:: max(1, math.ceil(len(pairs) / MAX_DOTS))]
        left, right = np.asarray(shown, dtype=float).T
        axes.scatter(left, right, s=14, color=_ACCENT, alpha=0.55, lw=0)
        if blind is not None:
            axes.axhline(blind, color=_INK, lw=1.2, ls=(0, (1, 2)), label="blind guess, median")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderaxespad=0.2)
        _log_scale_if_wide(axes, "x", list(left))
        axes.set_xlabel("risk score")
        axes.set_ylabel(_plain(unit) or "outcome")
        return _inline(figure, name, description)


def _plain(text: str) -> str:
    """A unit as it may stand in a drawing: short, of letters, digits and a few signs."""
    return re.sub(r"[^\w ²·/%().-]", "", text)[:24] if text not in ("", "1") else ""


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


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _spread(amount: int) -> np.ndarray:
    """Offsets to the side that keep dots apart: van der Corput's sequence in ±0.18."""
    bits = [int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, amount + 1)]
    return (np.array(bits) - 0.5) * 0.36 if amount > 1 else np.zeros(amount)


def _log_scale_if_wide(axes: Axes, side: str, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) / min(values) > 50:
        axes.set(**{f"{side}scale": "log"})
        axis = axes.xaxis if side == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: number(value, 1).removeprefix("1 × "))
        )
        axis.set_minor_formatter(NullFormatter())


def _inline(figure: Figure, name: str, description: str) -> Markup:
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
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure()
        places = np.arange(1, len(reached) + 1)
        for (limit, psnr), (colour, dashes) in zip(
            limits.items(), ((_LEAK, (0, ())), (_INK, (0, (4, 2)))), strict=False
        ):
            line = np.asarray([np.nan if value is None else value for value in psnr], dtype=float)
            axes.plot(places, line, color=colour, lw=1.4, ls=dashes, label=limit)
            axes.fill_between(
                places, reached, line, where=line >= reached, color=_MUTED, alpha=0.12, lw=0
            )
        axes.scatter(places, reached, s=12, color=_ACCENT, lw=0, zorder=3, label="attack")
        axes.set_xlabel("sample, least protected first")
        axes.set_ylabel("PSNR")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
                    borderaxespad=0.2, handlelength=1.6, columnspacing=1.2)  # fmt: skip
        return _inline(figure, name, description)
