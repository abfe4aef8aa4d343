"""Figures of I²F's experiments."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from simulations.papers.i2f.evidence import Table

COLOURS = "viridis"


def grid(count: int, wide: int = 3, height: float = 2.8) -> tuple[Figure, list[Any]]:
    """A figure with so many panels."""
    columns = min(wide, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.1 * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, list(axes[:count])


def against_equality(
    tables: Mapping[str, Table], x: str, y: str, x_name: str, y_name: str, shade: str = "variance"
) -> Figure:
    """Y over x with the line of equal values; darker dots have a smaller ``shade``."""
    figure, axes = grid(len(tables))
    for axis, (name, table) in zip(axes, tables.items(), strict=True):
        tone = np.log10(table[shade]) if shade == "variance" else table[shade]
        axis.scatter(table[x], table[y], c=tone, s=8, cmap=COLOURS)
        ends = [min(table[x].min(), table[y].min()), max(table[x].max(), table[y].max())]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=name, xlabel=x_name, ylabel=y_name)
        axis.title.set_fontsize(9)
    return figure


def scatters(
    tables: Mapping[str, Table], x: str, ys: Sequence[str], x_name: str, shade: str = "variance"
) -> Figure:
    """One row of panels for each of ``ys``; x is logarithmic."""
    figure, axes = grid(len(tables) * len(ys), wide=len(tables), height=2.5)
    for place, axis in enumerate(axes):
        y = ys[place // len(tables)]
        name, table = list(tables.items())[place % len(tables)]
        axis.scatter(table[x], table[y], c=np.log10(table[shade]), s=8, cmap=COLOURS)
        axis.set(xscale="log", title=name, xlabel=x_name, ylabel=y)
        axis.title.set_fontsize(9)
    return figure


def boxes(groups: Mapping[str, Mapping[str, np.ndarray]], y_name: str, log: bool = True) -> Figure:
    """A panel for each entry, a box for each of its groups."""
    figure, axes = grid(len(groups), wide=2)
    for axis, (name, values) in zip(axes, groups.items(), strict=True):
        axis.boxplot(list(values.values()), whis=(0, 100))
        axis.set_xticks(range(1, len(values) + 1), list(values), fontsize=7)
        axis.set(title=name, ylabel=y_name, **({"yscale": "log"} if log else {}))
        axis.title.set_fontsize(9)
    return figure


def lines(
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    x_name: str,
    log: tuple[bool, bool] = (False, True),
) -> Figure:
    """A panel for each entry; in it a line for each x and y."""
    figure, axes = grid(len(panels))
    for axis, (name, drawn) in zip(axes, panels.items(), strict=True):
        for label, (x, y) in drawn.items():
            axis.plot(x, y, marker=".", linewidth=1, label=label)
        axis.set(title=name, xlabel=x_name)
        axis.set_xscale("symlog" if log[0] else "linear")
        axis.set_yscale("log" if log[1] else "linear")
        axis.title.set_fontsize(9)
        if len(drawn) <= 6:
            axis.legend(fontsize=6)
    return figure
