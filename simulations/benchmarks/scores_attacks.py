"""Do the scores rank attacks? Digits are attacked and scored; every pair is a row of a CSV file.

    python -m simulations.benchmarks.scores_attacks --output attacks.csv
    python -m simulations.benchmarks.scores_attacks --report attacks.csv

The first takes minutes and can be stopped: rows are written after each group of digits. The second
prints the tables behind results/scores.md. Every digit is a client of its own that takes one step;
its gradient is released with independent Gaussian noise on every entry, or with its smallest
entries pruned. The attack is the preset ``idlg`` (L2, L-BFGS, 400 iterations, no prior) with known
labels; it does not know the defense, which is the attacker that the I²F describes.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import AngularJacobian
from flwr_leakage.params import Params, unravel
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from flwr_leakage.spectral import largest_eigenvalue, solve_damped
from simulations.benchmarks import lab
from simulations.benchmarks.calibration import fit_calibration
from simulations.benchmarks.scores_setup import (
    SETTINGS,
    Spectra,
    dense_spectra,
    krylov_start,
    operator_of,
    prepare,
)

DIGITS = 32
NETWORKS = ("LeNet 28", "LeNet 28 trained")
NOISES = (1e-3, 3e-3, 1e-2, 3e-2)
PRUNINGS = (0.5, 0.9, 0.99)
DRAWS = 2
BOOTSTRAPS = 300
SCORES = (
    "gradient_norm",
    "lambda_max",
    "lambda_min",
    "angular_max",
    "influence_lower_bound_rmse",
    "influence_krylov_bound_rmse",
    "inversion_influence_rmse_1e-03",
    "inversion_influence_rmse_1e-06",
    "inversion_influence_rmse_undamped",
)
Row = dict[str, str | float]


def conditions(gradients: Tensor) -> Iterator[tuple[str, float, int, Tensor]]:
    """Defense, strength, draw and δ of every digit, (S, P)."""
    for draw in range(DRAWS):
        unit = torch.randn(gradients.shape, generator=lab.generator(10 + draw), dtype=torch.float64)
        for noise_std in NOISES:
            yield "noise", noise_std, draw, noise_std * unit
    for ratio in PRUNINGS:
        kept = gradients.abs() > gradients.abs().quantile(ratio, dim=1, keepdim=True)
        yield "pruning", ratio, 0, torch.where(kept, 0.0, -gradients)


def score_digits(
    model: nn.Module, batch: Batch, spectra: Spectra
) -> tuple[Tensor, Callable[[Tensor], dict[str, list[float]]]]:
    """Gradients (S, P), and the scores of each digit for a given δ."""
    operator = operator_of(model, batch, torch.float64)
    angular = AngularJacobian(operator, operator.value)
    fixed = {
        "gradient_norm": operator.value.norm(dim=1),
        "lambda_max": spectra.eigenvalues[:, -1],
        "lambda_min": spectra.eigenvalues[:, 0],
        "angular_max": largest_eigenvalue(angular, krylov_start(operator)).estimate.value,
    }
    root = operator.num_inputs**0.5

    def of(deltas: Tensor) -> dict[str, list[float]]:
        projected = operator.rmatvec(deltas)
        bound = solve_damped(operator, deltas, (1e-12,), 0.0, 8).lower_bounds[:, 0]
        found = {
            **fixed,
            "influence_lower_bound_rmse": projected.norm(dim=1) / fixed["lambda_max"] / root,
            "influence_krylov_bound_rmse": bound / root,
            "inversion_influence_rmse_1e-03": spectra.influence(projected, 1e-3) / root,
            "inversion_influence_rmse_1e-06": spectra.influence(projected, 1e-6) / root,
            "inversion_influence_rmse_undamped": spectra.influence(projected) / root,
        }
        return {name: values.tolist() for name, values in found.items()}

    return operator.value, of


def attack_digits(
    model: nn.Module, batch: Batch, released: Tensor
) -> Iterator[tuple[float, float]]:
    """RMSE in pixels and final objective for every digit."""
    gradient_map = GradientMap(model)
    params, buffers = gradient_map.params, gradient_map.buffers
    observations = []
    for index, gradient in enumerate(released):
        delta: Params = unravel(-gradient.float(), params)
        update = Update(delta, buffers, LocalSchedule(1.0), 1)
        disclosed = Disclosure(targets=batch.targets[index : index + 1])
        observations.append(Observation(1, index, params, buffers, update, disclosed))
    spec = InputSpec(tuple(batch.inputs.shape[1:]), lab.CLASSES)
    threat = ThreatModel(labels="known")
    found, _ = lab.run_attack(load_preset("idlg"), gradient_map, spec, observations, threat)
    for index, result in enumerate(found):
        assert result.batch is not None, result.error
        error = (result.batch.inputs[0] - batch.inputs[index]).square().mean().sqrt()
        yield float(error), result.objective


def record(path: Path) -> None:
    """Score and attack every digit under every defense."""
    fields = ("network", "defense", "strength", "draw", "digit", "rmse", "objective", *SCORES)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        for label in NETWORKS:
            model, batch = prepare(SETTINGS[label], DIGITS, None)
            gradients, scores_of = score_digits(model, batch, dense_spectra(model, batch))
            for defense, strength, draw, deltas in conditions(gradients):
                scores = scores_of(deltas)
                errors = attack_digits(model, batch, gradients + deltas)
                for digit, (rmse, objective) in enumerate(errors):
                    row = {name: values[digit] for name, values in scores.items()}
                    row |= {"network": label, "defense": defense, "strength": strength}
                    row |= {"draw": draw, "digit": digit, "rmse": rmse, "objective": objective}
                    writer.writerow(row)
                file.flush()


def read(path: Path) -> list[Row]:
    """The rows of a recording, numbers as floats."""
    with path.open(newline="") as file:
        return [
            {k: v if k in ("network", "defense") else float(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        ]


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """The numbers of a column."""
    return np.array([float(row[name]) for row in rows])


def rank_correlation(groups: Sequence[Sequence[Row]], name: str) -> tuple[float, float, float]:
    """Spearman's ρ of a score and the RMSE, mean over groups, with a 95 % bootstrap interval.

    The bootstrap draws digits, with all of their rows.
    """
    tables = [
        np.array([[float(r["digit"]), float(r[name]), float(r["rmse"])] for r in group])
        for group in groups
    ]
    of_digit = [{d: np.flatnonzero(t[:, 0] == d) for d in set(t[:, 0])} for t in tables]
    digits = sorted(of_digit[0])

    def mean(chosen: Sequence[float]) -> float:
        found = []
        for table, places in zip(tables, of_digit, strict=True):
            taken = table[np.concatenate([places[digit] for digit in chosen])]
            found.append(spearmanr(taken[:, 1], taken[:, 2], nan_policy="omit").statistic)
        return float(np.mean(found))

    draws = np.random.default_rng(0)
    resampled = [mean(draws.choice(digits, len(digits))) for _ in range(BOOTSTRAPS)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return mean(digits), float(low), float(high)


def report(rows: list[Row]) -> None:
    """All tables."""
    for network in NETWORKS:
        mine = [row for row in rows if row["network"] == network]
        if mine:
            print(f"\n{network}: Spearman of score and attack RMSE, 95 % interval over digits\n")
            _rankings(mine)
            print(f"\n{network}: median RMSE, and predicted by the undamped I²F\n")
            _levels(mine)
            print(f"\n{network}: calibration of log₁₀ RMSE under noise\n")
            _calibrations(mine, network)


def _groups(rows: list[Row]) -> dict[str, list[list[Row]]]:
    """Rows to rank together, by what they have in common; draws are ranked on their own."""
    found: dict[str, list[list[Row]]] = {}
    for defense, sign in (("noise", "σ"), ("pruning", "p")):
        of = [row for row in rows if row["defense"] == defense]
        draws = sorted({row["draw"] for row in of})
        levels = sorted({row["strength"] for row in of})
        for level in levels:
            parts = [
                [r for r in of if r["strength"] == level and r["draw"] == draw] for draw in draws
            ]
            found[f"{sign} = {level:g}"] = [part for part in parts if part]
        if len(levels) > 1:
            found[f"all {sign}"] = [[r for r in of if r["draw"] == draw] for draw in draws]
    return found


def _rankings(rows: list[Row]) -> None:
    groups = _groups(rows)
    lab.print_header("score", *groups)
    for name in SCORES:
        cells = []
        for group in groups.values():
            center, low, high = rank_correlation(group, name)
            cells.append(f"{center:+.2f} [{low:+.2f}, {high:+.2f}]")
        lab.print_row(name, *cells)


def _levels(rows: list[Row]) -> None:
    lab.print_header("defense", "median RMSE (least … largest)", "median predicted", "median ratio")
    for label, group in _groups(rows).items():
        if label.startswith("all"):
            continue
        pooled = [row for draw in group for row in draw]
        errors, predicted = (column(pooled, n) for n in ("rmse", SCORES[-1]))
        spread = f"{errors.min():.2g} … {errors.max():.2g}"
        ratio = np.median(errors / predicted)
        lab.print_row(
            label,
            f"{np.median(errors):.3g} ({spread})",
            f"{np.median(predicted):.3g}",
            f"{ratio:.2f}",
        )


def _calibrations(rows: list[Row], network: str) -> None:
    """Fit on the first half of the digits, try on the second."""
    noisy = [row for row in rows if row["defense"] == "noise"]
    lab.print_header(
        "score",
        "slope",
        "pairs",
        "leave-one-out error, decades",
        "of the mean",
        "error on other digits",
    )
    for name in SCORES:
        seen = [row for row in noisy if float(row["digit"]) < DIGITS / 2]
        other = [row for row in noisy if float(row["digit"]) >= DIGITS / 2]
        values, errors = column(seen, name).tolist(), column(seen, "rmse").tolist()
        fit = fit_calibration(name, values, errors, "rmse", f"idlg, {network}, Gaussian noise")
        predicted = fit.intercept + fit.slope * np.log10(column(other, name))
        miss = np.sqrt(np.mean((predicted - np.log10(column(other, "rmse"))) ** 2))
        lab.print_row(
            name,
            f"{fit.slope:+.2f}",
            fit.num_pairs,
            f"{fit.error:.3f}",
            f"{fit.baseline_error:.3f}",
            f"{miss:.3f}",
        )


def main() -> None:
    """Record, or report."""
    parser = lab.command(__doc__)
    parser.add_argument("--output", type=Path, help="record attacks into this CSV file")
    parser.add_argument("--report", type=Path, help="print the tables of this CSV file")
    arguments = lab.start(parser)
    if arguments.output:
        record(arguments.output)
    if arguments.report:
        report(read(arguments.report))


if __name__ == "__main__":
    main()
