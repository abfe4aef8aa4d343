"""The numbers of Huang et al. 2021, Table 2, and what a rerun says of their orders."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from simulations.papers.findings import Claim, Row
from simulations.papers.i2f.evidence import bootstrap, judged, table_of
from simulations.papers.i2f.evidence import spearman as rank_correlation
from simulations.papers.judge import by_difference, by_sign, not_compared
from simulations.papers.spearman import spearman

TEST_IMAGES = 2000
"""Of the accuracy; see ``training.trained``."""


@dataclass(frozen=True)
class Printed:
    """A row of the paper's table.

    Attributes:
        accuracy: in percent.
        time: of training, in units of no defense; ``None`` where the text copy is spoiled.
        lpips: average by batch size.
    """

    accuracy: float
    time: float | None
    lpips: Mapping[int, float]


def _printed(accuracy: float, time: float | None, *lpips: float) -> Printed:
    return Printed(accuracy, time, dict(zip((1, 16, 32), lpips, strict=True)))


PAPER: Mapping[str, Printed] = {
    "none": _printed(93.37, 1.0, 0.19, 0.45, 0.45),
    "prune 0.5": _printed(93.19, 1.04, 0.19, 0.46, 0.46),
    "prune 0.7": _printed(93.01, 1.04, 0.22, 0.47, 0.48),
    "prune 0.9": _printed(90.57, 1.04, 0.35, 0.51, 0.52),
    "prune 0.95": _printed(89.92, 1.04, 0.42, 0.55, 0.54),
    "prune 0.99": _printed(88.61, 1.04, 0.52, 0.58, 0.58),
    "prune 0.999": _printed(83.58, 1.04, 0.52, 0.61, 0.63),
    "MixUp 4": _printed(92.31, None, 0.34, 0.34, 0.50),
    "MixUp 6": _printed(90.41, None, 0.46, 0.31, 0.49),
    "InstaHide 4": _printed(90.04, None, 0.58, 0.62, 0.69),
    "InstaHide 6": _printed(88.20, None, 0.61, 0.63, 0.69),
    "MixUp 4 + prune 0.9": _printed(91.37, None, 0.41, 0.46, 0.62),
    "InstaHide 4 + prune 0.9": _printed(86.10, None, 0.60, 0.68, 0.73),
}
"""Complete, as printed; times of mixing are spoiled in the text at hand."""

ORDERS = (
    ("prune 0.999", "none", "Pruning 99.9 % hides"),
    ("InstaHide 4", "none", "InstaHide with 4 images hides"),
    ("InstaHide 4", "prune 0.999", "InstaHide hides more than pruning 99.9 %"),
    ("InstaHide 4 + prune 0.9", "InstaHide 4", "Pruning 90 % added to InstaHide hides more"),
    ("prune 0.999", "MixUp 4", "Pruning 99.9 % hides more than MixUp with 4 images"),
    ("MixUp 4", "none", "MixUp with 4 images against none (less hidden at batch 16)"),
)
"""(first, second, words): LPIPS(first) − LPIPS(second) has the sign of the paper's cells."""

COSTS = ("prune 0.999", "InstaHide 4", "InstaHide 4 + prune 0.9", "MixUp 4")


def judge(samples: Sequence[Row], table: Sequence[Row]) -> tuple[Claim, ...]:
    """The orders of the paper's cells, each with the interval of its difference.

    Args:
        samples: one row a sample, with ``defense``, ``batch``, ``seed``, ``sample`` and ``lpips``.
        table: one row a cell, with ``accuracy %``.
    """
    sizes = list(dict.fromkeys(int(str(row["batch"])) for row in table))
    claims: list[Claim] = []
    for size in [s for s in sizes if s in (1, 16, 32)]:
        values = _by_defense(samples, size)
        for first, second, words in ORDERS:
            difference = PAPER[first].lpips[size] - PAPER[second].lpips[size]
            text = f"{words}: difference of LPIPS, batch {size} (Table 2)."
            claims.append(
                by_difference(text, difference, values(first), values(second))
                if abs(difference) > 1e-9
                else not_compared(text, "0.00", "the paper's cells are equal")
            )
        claims.append(_grows(values, size))
    larger = [size for size in sizes if size in (16, 32)]
    if 1 in sizes and larger:
        one, many = _by_defense(samples, 1)("none"), _by_defense(samples, larger[0])("none")
        difference = PAPER["none"].lpips[larger[0]] - PAPER["none"].lpips[1]
        text = f"Batches of {larger[0]} leak less than single images without a defense (Table 2)."
        claims.append(by_difference(text, difference, many, one))
    return (*claims, *[_cost(name, table) for name in COSTS])


def _by_defense(samples: Sequence[Row], size: int) -> Callable[[str], list[float | None]]:
    """LPIPS of each image, the mean over the seeds, as these have the same images."""

    def values(name: str) -> list[float | None]:
        images: dict[object, list[float]] = {}
        for row in samples:
            if row["defense"] == name and row["batch"] == size:
                found = images.setdefault(row.get("sample"), [])
                found += [] if (v := row.get("lpips")) is None else [float(v)]
        return [sum(found) / len(found) if found else None for found in images.values()]

    return values


def _grows(values: Callable[[str], list[float | None]], size: int) -> Claim:
    """Spearman of the pruning ratio and LPIPS; images are drawn with all of their ratios."""
    names = [name for name in PAPER if name.startswith("prune")]
    printed = spearman(
        [float(name.split()[1]) for name in names], [PAPER[name].lpips[size] for name in names]
    ).coefficient
    text = f"LPIPS grows with the pruning ratio: Spearman, batch {size} (Table 2, Fig. 3)."
    rows: list[Row] = [
        {"image": image, "ratio": float(name.split()[1]), "lpips": value}
        for name in names
        for image, value in enumerate(values(name))
        if value is not None
    ]
    if len(rows) < 3:
        return not_compared(text, f"{printed:.2f}", "too few values")
    found = bootstrap(table_of(rows), partial(rank_correlation, x="ratio", y="lpips"))
    return judged(text, f"{printed:.2f}", found, least=0.0)


def _cost(name: str, table: Sequence[Row]) -> Claim:
    """Points of accuracy that a defense costs; the interval is of the test images alone."""
    loss = PAPER["none"].accuracy - PAPER[name].accuracy
    text = f"{name} costs accuracy, in points (Table 2)."
    accuracy = {str(row["defense"]): row["accuracy %"] for row in table}
    if name not in accuracy or "none" not in accuracy:
        return not_compared(text, f"{loss:.2f}", "not among the rows of this size")
    first, second = (float(accuracy[key] or 0) / 100 for key in ("none", name))
    variance = sum(p * (1 - p) / TEST_IMAGES for p in (first, second))
    value, half = 100 * (first - second), 196 * math.sqrt(variance)
    return by_sign(
        text, f"{loss:.2f}", (value, value - half, value + half), TEST_IMAGES, loss, loss
    )


def leakage_figure(table: Sequence[Row], sizes: Sequence[int]) -> Figure:
    """LPIPS against accuracy, as the paper's Fig. 3, one panel a batch size; ours and theirs."""
    figure = Figure(figsize=(4.2 * len(sizes), 3.6), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        for row in table:
            name = str(row["defense"])
            if row["batch"] != size:
                continue
            if row.get("lpips") is not None:
                low, mean, high = (float(row[k] or 0) for k in ("lpips low", "lpips", "lpips high"))
                x = float(row["accuracy %"] or 0)
                axes.errorbar(x, mean, [[mean - low], [high - mean]], fmt="o", color="C0", ms=4)
                axes.annotate(
                    name, (x, mean), fontsize=6, xytext=(3, 3), textcoords="offset points"
                )
            if size in PAPER[name].lpips:
                axes.plot(PAPER[name].accuracy, PAPER[name].lpips[size], "x", color="C1", ms=5)
        axes.set_title(f"batch {size}: ours ●, paper ×", fontsize=9)
        axes.set_xlabel("test accuracy, %")
        axes.set_ylabel("LPIPS (higher: more hidden)")
    return figure
