"""Where this project's own claims end: the share that an attack or a test finds, to its edge.

    python -m simulations.benchmarks.edges batches --root FOLDER --output edges
    python -m simulations.benchmarks.edges images --root FOLDER --output edges
    python -m simulations.benchmarks.edges replays --root FOLDER --output edges
    python -m simulations.benchmarks.edges membership --root FOLDER --output edges
    python -m simulations.benchmarks.edges texts --root FOLDER --output edges

Each command measures the curves of one figure and writes ``FIGURE.jsonl``, ``FIGURE.md`` and
``FIGURE.png`` into the folder ``--output``. A curve follows one quantity, such as the samples of an
update or the noise on it, while all else stays. At each point ``--draws`` draws have weights and
samples of their own, from seed ``--seed`` on. An interrupted command goes on where it was, and
``--draws 0`` draws what has been measured. An attack has ``--seconds`` of the CPU. ``--processes``
share the curves of all seeds. Curves of a GPU are measured where there is one.

A share's interval is Clopper and Pearson's at 95 % with n the number of *draws*, as if all samples
of one update shared their fate: it is too wide rather than too narrow. The *edge* of a curve is the
interval of two neighbouring points between which its share falls below one half.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.stats import beta

from simulations.benchmarks import lab
from simulations.benchmarks.attacks_portfolio import read_rows
from simulations.benchmarks.edge_curves import FIGURES, Curve, Draw, Figure, Outcome

# Rows, tables, pictures


def interval(share: float, draws: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share at 95 %, by beta quantiles.

    A share need not be a multiple of 1 / ``draws``, as a draw may be found in part.
    """
    low = beta.ppf(0.025, share * draws, (1 - share) * draws + 1) if share > 0 else 0.0
    high = beta.ppf(0.975, share * draws + 1, (1 - share) * draws) if share < 1 else 1.0
    return float(low), float(high)


def points_of(
    curve: Curve, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[float, list[Outcome]]]:
    """Return each point of a curve that was measured, with its draws."""
    mine = [row for row in rows if (row["panel"], row["curve"]) == (curve.panel, curve.name)]
    for value in curve.points:
        here = [
            Outcome(**{name: row[name] for name in Outcome.__dataclass_fields__})
            for row in mine
            if row["value"] == value
        ]
        if here:
            yield value, here


def share(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of a share over draws."""
    return sum(getattr(each, name) for each in outcomes) / len(outcomes)


def edge(points: Sequence[tuple[float, list[Outcome]]], name: str) -> str:
    """Return in words where a share falls below one half."""
    if not points:
        return "–"
    if share(points[0][1], name) < 0.5:
        return f"below {points[0][0]:g}"
    for (before, above), (after, below) in pairwise(points):
        if share(above, name) >= 0.5 > share(below, name):
            return f"{before:g} to {after:g}"
    return f"above {points[-1][0]:g}"


def run_curve(name: str, number: int, seed: int, given: argparse.Namespace) -> None:
    """Measure the points of one curve that are missing for one seed, and append a row for each."""
    curve, output = FIGURES[name]().curves[number], given.output / f"{name}.jsonl"
    done = {(r["panel"], r["curve"], r["value"], r["seed"]) for r in read_rows(output)}
    for value in curve.points:
        key = (curve.panel, curve.name, value, seed)
        if key in done:
            continue
        made = curve.measure(Draw(value, seed, given.root, given.seconds))
        about = dict(zip(("panel", "curve", "value", "seed"), key, strict=True))
        with output.open("a") as file:
            file.write(json.dumps({**about, **asdict(made)}) + "\n")


def table(figure: Figure, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each curve."""
    lines = []
    for curve in figure.curves:
        points = list(points_of(curve, rows))
        if not points:
            continue
        made = [each for _, outcomes in points for each in outcomes]
        counts = sorted({len(outcomes) for _, outcomes in points})
        lines.append([
            curve.panel, curve.name, "–".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
            edge(points, "found"), edge(points, "best"),
            ", ".join(f"{value:g}: {share(o, 'found'):.2f}" for value, o in points),
            sum(each.wrong for each in made), f"{max(each.cpu_seconds for each in made):.1f}",
        ])  # fmt: skip
    columns = [
        "quantity", "of", "draws a point", f"half are {figure.found} up to",
        f"half are {figure.best} up to", f"share {figure.found}", "wrong", "CPU s, most",
    ]  # fmt: skip
    return lab.markdown(columns, lines)


def draw_panel(axes: Axes, figure: Figure, panel: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the curves of one quantity with shaded intervals; its values stand at equal steps."""
    curves = [curve for curve in figure.curves if curve.panel == panel]
    values = sorted({value for curve in curves for value in curve.points})
    for number, curve in enumerate(curves):
        points = list(points_of(curve, rows))
        if not points:
            continue
        places = [values.index(value) for value, _ in points]
        found = [share(outcomes, "found") for _, outcomes in points]
        ends = [interval(s, len(o)) for s, (_, o) in zip(found, points, strict=True)]
        color = f"C{number}"
        axes.plot(places, found, "o-", color=color, markersize=3, label=curve.name)
        axes.fill_between(places, *zip(*ends, strict=True), color=color, alpha=0.12, linewidth=0)
        best = [share(outcomes, "best") for _, outcomes in points]
        axes.plot(places, best, "--", color=color, linewidth=1)
    for each in (rival for rival in figure.published if rival.panel == panel):
        there, shares = zip(*each.points, strict=True)
        places = list(np.interp(there, values, range(len(values))))
        axes.plot(places, shares, "x:", label=f"{each.name} (published)", linewidth=1)
    axes.axhline(0.5, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_xlabel(panel)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(f"share {figure.found} (dashed: {figure.best})", fontsize=8)
    axes.legend(fontsize=7, loc="lower left")


def picture(figure: Figure, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write all panels as one picture."""
    panels = list(dict.fromkeys(curve.panel for curve in figure.curves))
    lines = -(-len(panels) // 2)
    drawn, axes = plt.subplots(lines, 2, figsize=(11, 3.6 * lines), squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        if any(row["panel"] == panel for row in rows):
            draw_panel(place, figure, panel, rows)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    drawn.tight_layout()
    drawn.savefig(path, dpi=100)


def _is_here(device: str) -> bool:
    return device == "cpu" or torch.cuda.is_available()


def main() -> None:
    """Measure one figure, then write its table and its picture."""
    parser = lab.command(__doc__)
    parser.add_argument("figure", choices=list(FIGURES))
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--output", type=Path, required=True, help="folder of rows and pictures")
    parser.add_argument("--seed", type=int, default=0, help="below 100 for development")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the CPU, an attack")
    lab.add_processes(parser)
    given = lab.start(parser)
    given.output.mkdir(parents=True, exist_ok=True)
    figure = FIGURES[given.figure]()
    seeds = range(given.seed, given.seed + given.draws)
    curves = [n for n, curve in enumerate(figure.curves) if _is_here(curve.device)]
    lab.run_all(
        run_curve, [(given.figure, n, seed, given) for seed in seeds for n in curves], given
    )
    measured = read_rows(given.output / f"{given.figure}.jsonl")
    told = table(figure, measured)
    (given.output / f"{given.figure}.md").write_text(told)
    picture(figure, measured, given.output / f"{given.figure}.png")
    print(told)


if __name__ == "__main__":
    main()
