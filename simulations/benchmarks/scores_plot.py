"""The figure of docs/scores.md, from the tables that ``scores.py`` printed.

python -m simulations.benchmarks.scores --section meaning > meaning.md
python -m simulations.benchmarks.scores --section ranking > ranking.md
python -m simulations.benchmarks.scores_plot meaning.md ranking.md docs/scores.svg
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_table(path: Path) -> list[list[str]]:
    """The cells of a markdown table, without its head."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def main() -> None:
    """Draw both panels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("meaning", type=Path)
    parser.add_argument("ranking", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")

    rows = read_table(arguments.meaning)
    errors = [float(row[2]) for row in rows]
    left.scatter([float(row[3]) for row in rows], errors, label="I²F, ε = 1e-9 λmax", zorder=3)
    left.scatter([float(row[5]) for row in rows], errors, marker="x", label="lower bound I_lb")
    ends = [min(errors) / 2, max(errors) * 2]
    left.plot(ends, ends, color="grey", linewidth=0.8)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="predicted error ‖x̂ − x‖",
        ylabel="error of Gauss–Newton from the truth",
        title="What I²F means",
    )
    left.legend(loc="upper left", fontsize=8)

    for prefix, label, marker in (
        ("I²F", "damped I²F", "o"),
        ("Krylov", "Krylov bound", "s"),
        ("I_lb", "I_lb", "x"),
        ("λmax", "λmax", "^"),
        ("gradient norm", "gradient norm", "v"),
    ):
        points = [row for row in read_table(arguments.ranking) if row[0].startswith(prefix)]
        products = [max(1, int(row[1])) for row in points]
        right.plot(
            products,
            [float(row[2]) for row in points],
            marker=marker,
            linewidth=0.8 if len(points) > 1 else 0,
            label=label,
        )
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(
        xscale="log",
        ylim=(-1, 1.05),
        xlabel="Jacobian products per sample",
        ylabel="Spearman's ρ with the undamped I²F",
        title="Which cheap number ranks samples",
    )
    right.legend(fontsize=8)
    figure.savefig(arguments.output)


if __name__ == "__main__":
    main()
