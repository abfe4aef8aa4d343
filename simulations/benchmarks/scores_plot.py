"""The figure of docs/scores.md, from recorded attacks.

python -m simulations.benchmarks.scores_attacks --output attacks.csv
python -m simulations.benchmarks.scores_plot attacks.csv docs/scores.svg
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from simulations.benchmarks import lab
from simulations.benchmarks.scores_attacks import (
    NETWORKS,
    NOISES,
    SCORES,
    Row,
    column,
    rank_correlation,
    read,
)

PREDICTIONS = (
    ("inversion_influence_rmse_1e-06", "I²F, ε = 1e-6 λmax", "o"),
    ("influence_krylov_bound_rmse", "Krylov bound, 8 steps", "s"),
    ("influence_lower_bound_rmse", "I_lb", "x"),
)
LABELS = {
    "gradient_norm": "gradient norm",
    "lambda_max": "λmax",
    "lambda_min": "λmin (exact)",
    "angular_max": "ang_max",
    "influence_lower_bound_rmse": "I_lb",
    "influence_krylov_bound_rmse": "Krylov bound",
    "inversion_influence_rmse_1e-03": "I²F, ε = 1e-3 λmax",
    "inversion_influence_rmse_1e-06": "I²F, ε = 1e-6 λmax",
    "inversion_influence_rmse_undamped": "I²F, undamped",
}


def draw_predictions(axes: Axes, rows: list[Row]) -> None:
    """Predicted error against that of the attack, all noise levels."""
    errors = column(rows, "rmse")
    for name, label, marker in PREDICTIONS:
        predicted = column(rows, name)
        axes.scatter(predicted, errors, 12, marker=marker, alpha=0.6, label=label, linewidths=0.8)
    ends = [errors.min() / 2, errors.max() * 2]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="predicted RMSE (pixels in [0, 1])",
        ylabel="RMSE of the attack",
        title=f"{NETWORKS[0]}, untrained, σ = {NOISES[0]:g} … {NOISES[-1]:g}",
    )
    axes.legend(fontsize=8, loc="upper left")


def draw_rankings(axes: Axes, rows: list[Row], noise_std: float) -> None:
    """ρ of each score and the attack's error within one noise level."""
    for shift, network, color in ((0.12, NETWORKS[0], "C0"), (-0.12, NETWORKS[1], "C3")):
        mine = [r for r in rows if r["network"] == network and r["strength"] == noise_std]
        draws = sorted({float(r["draw"]) for r in mine})
        groups = [[r for r in mine if r["draw"] == draw] for draw in draws]
        if not groups:
            continue
        found = [rank_correlation(groups, name) for name in SCORES]
        centers = [center for center, _, _ in found]
        bars = [[c - low for c, low, _ in found], [high - c for c, _, high in found]]
        places = [len(SCORES) - 1 - i + shift for i in range(len(SCORES))]
        label = "trained" if "trained" in network else "untrained"
        axes.errorbar(centers, places, xerr=bars, fmt="o", markersize=4, color=color, label=label)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set(
        xlim=(-1, 1),
        xlabel="Spearman's ρ with the RMSE of the attack",
        title=f"32 digits under the same noise, σ = {noise_std:g}",
    )
    axes.set_yticks(range(len(SCORES)), [LABELS[name] for name in reversed(SCORES)])
    axes.legend(fontsize=8, loc="lower left")


def main() -> None:
    """Draw both panels."""
    parser = lab.command(__doc__)
    parser.add_argument("attacks", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    noisy = [row for row in read(arguments.attacks) if row["defense"] == "noise"]
    matplotlib.rcParams["svg.hashsalt"] = "scores"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_predictions(left, [row for row in noisy if row["network"] == NETWORKS[0]])
    draw_rankings(right, noisy, 1e-2)
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
