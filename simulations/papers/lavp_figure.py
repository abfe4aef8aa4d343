"""LAVP's Figure 2: proxies against the MSE of reconstructions."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from simulations.papers.findings import Row
from simulations.papers.numbers import numbers

PANELS = (
    ("L2", "grad_norm"),
    ("L2", "max"),
    ("L2", "min"),
    ("cosine", "grad_norm"),
    ("cosine", "ang_max"),
    ("cosine", "ang_min"),
)


def scatter(
    measured: Mapping[str, list[Row]], panels: Sequence[tuple[str, str]] = PANELS
) -> Figure:
    """One panel for each (loss, proxy), one colour a network."""
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(3.4 * wide, 2.7 * high), layout="constrained")
    for place, (loss, proxy) in enumerate(panels):
        axes = figure.add_subplot(high, wide, place + 1)
        for name, rows in measured.items():
            across, up = numbers(rows, proxy), numbers(rows, f"{loss} mse")
            axes.scatter(across, up, s=9, label=name, alpha=0.7)
        axes.set_xscale("log")
        axes.set_title(f"{loss} attacks", fontsize=9)
        axes.set_xlabel(proxy, fontsize=8)
        axes.set_ylabel("MSE of the reconstruction (pixel²)", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].legend(fontsize=7)
    return figure
