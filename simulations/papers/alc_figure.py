"""Figures of the angular Lipschitz study."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from simulations.papers.alc_study import chosen, image_values
from simulations.papers.findings import Row
from simulations.papers.numbers import number, numbers

COLOURS = {"eval": "tab:orange", "train": "tab:blue"}


def over_training(
    rows: list[Row], networks: Sequence[str], outcome: str = "mse_normalised"
) -> Figure:
    """An outcome over the epochs, one panel a network, one colour a BatchNorm mode."""
    figure = Figure(figsize=(3.0 * len(networks) + 0.6, 2.7), layout="constrained")
    for place, name in enumerate(networks):
        axes = figure.add_subplot(1, len(networks), place + 1)
        own = chosen(rows, network=name)
        epochs = sorted({int(row["epoch"] or 0) for row in own})
        for mode, colour in COLOURS.items():
            values = [image_values(chosen(own, mode=mode, epoch=e), outcome) for e in epochs]
            means = [float(v.mean()) for v in values]
            errors = [float(v.std()) for v in values]
            places = range(len(epochs))
            axes.errorbar(places, means, errors, color=colour, capsize=2, label=f"{mode} mode")
        axes.set_xticks(range(len(epochs)), [str(epoch) for epoch in epochs])
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("epoch", fontsize=8)
        axes.set_ylabel(outcome.replace("_", ", "), fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].legend(fontsize=7)
    return figure


def against_lipschitz(rows: list[Row], outcome: str, mean: Callable[[Row, str], float]) -> Figure:
    """Loss drop against L̃, and the outcome against ‖g‖, L̃ and L̃cos."""
    figure = Figure(figsize=(11, 2.7), layout="constrained")
    panels = (
        ("lipschitz", "loss_drop"),
        ("gradient_norm", outcome),
        ("lipschitz", outcome),
        ("angular_lipschitz", outcome),
    )
    for place, (left, right) in enumerate(panels):
        axes = figure.add_subplot(1, 4, place + 1)
        for mode, colour in COLOURS.items():
            own = chosen(rows, mode=mode)
            drop = right == "loss_drop"
            heights = [number(row[right]) if drop else mean(row, right) for row in own]
            axes.scatter(numbers(own, left), heights, s=8, color=colour, label=mode)
        axes.set_xscale("log")
        axes.set_xlabel(left, fontsize=8)
        axes.set_ylabel(right, fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].legend(fontsize=7)
    return figure
