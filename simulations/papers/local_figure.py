"""Final losses of local convergence against the proxies of the same loss."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from simulations.papers.findings import Row
from simulations.papers.numbers import numbers


def final_losses(rows: Sequence[Row], rates: Sequence[float]) -> Figure:
    """One panel for each loss, one colour a rate."""
    figure = Figure(figsize=(6.8, 2.7), layout="constrained")
    for place, (loss, proxy) in enumerate((("L2", "max"), ("cosine", "ang_max"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for rate in rates:
            across, up = numbers(rows, proxy), numbers(rows, f"{loss} loss at {rate}")
            axes.scatter(across, up, s=12, label=f"rate {rate} / median {proxy}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(proxy, fontsize=8)
        axes.set_ylabel(f"final {loss} loss", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7)
    return figure
