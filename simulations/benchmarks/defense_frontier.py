"""Leakage against accuracy: noise put where it hides most, against isotropic noise.

    python -m simulations.benchmarks.defense_frontier --output frontier --seeds 0 1 2

trains a LeNet with tanh on real MNIST digits under each defense and strength (8 clients, one
step on 4 samples a round), and lets a strong attacker (known labels, L-BFGS in float64, total
variation weight tuned on other digits under the same defense) invert batches of 4 at the first
and at a later round of that very run. Beside what it reaches stands what the best linear attacker
would be left with, one who knows the noise's covariance (equation 1 of ``defenses/spectrum.py``).

Each seed draws weights, partition, noise and victims anew, and accuracy is compared with training
without a defense under the same draws. Runs are added to ``frontier.json`` one by one, those found
there are not repeated; ``frontier.md`` and ``frontier.png`` give means and standard deviations
over seeds. ``--rounds 0`` attacks the untrained network alone.
"""

import argparse
import json
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from flwr_leakage.attacks import LBFGS, Euclidean, GradientInversion, TotalVariation
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import (
    Defense,
    GaussianNoise,
    InfluenceNoise,
    LocalRound,
    NoDefense,
    TargetRisk,
)
from flwr_leakage.defenses.influence_noise import allot_energy
from flwr_leakage.defenses.spectrum import SampleSpectra
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.params import Params
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import Batch, LocalSchedule, Update
from simulations.benchmarks import lab
from simulations.benchmarks.defense_lab import STRONG, Trained, observe, train

BATCH, LEARNING_RATE, LANCZOS_STEPS = 4, 0.1, 10
TV_WEIGHTS = (1e-2, 1e-1)
ISOTROPIC = "isotropic noise"

FAMILIES: dict[str, dict[float, Defense]] = {
    ISOTROPIC: {s: GaussianNoise(s) for s in (0.03, 0.1, 0.2, 0.4)},
    "influence_noise": {s: InfluenceNoise(s, num_steps=LANCZOS_STEPS) for s in (0.03, 0.1, 0.2)},
    "target_risk (influence)": {
        t: TargetRisk(t, "influence", num_steps=LANCZOS_STEPS) for t in (0.9, 0.7, 0.5)
    },
    "target_risk (gaussian)": {
        t: TargetRisk(t, "gaussian", num_steps=LANCZOS_STEPS) for t in (0.9, 0.7)
    },
}


def predicted_rmse(
    defense: Defense, gradient_map: GradientMap, params: Params, batch: Batch, seed: int
) -> list[float]:
    """What the best linear attacker is left with, for each sample, in model input units."""
    schedule = LocalSchedule(LEARNING_RATE, 1, len(batch))
    around = LocalRound(gradient_map, params, gradient_map.buffers, batch, batch)
    draws = Reproducible.from_seed(seed, purpose="prediction")
    if isinstance(defense, TargetRisk):
        delta = local_update(gradient_map, params, batch, schedule, gradient_map.buffers)
        plan = defense.plan(Update(delta, {}, schedule, len(batch)), draws, around)
        return plan.predicted_rmse.tolist()
    spectra = SampleSpectra.measure(around, schedule, draws, num_steps=LANCZOS_STEPS)
    if isinstance(defense, GaussianNoise):
        return spectra.error_under_isotropic_noise(defense.noise_std).tolist()
    assert isinstance(defense, InfluenceNoise)
    energy = defense.noise_std**2 * sum(value.numel() for value in params.values())
    return spectra.error_at(allot_energy(spectra, energy, defense.allotment)).tolist()


def attack_rmse(
    gradient_map: GradientMap,
    params: Params,
    data: ImageDataset,
    indices: torch.Tensor,
    defense: Defense,
    tv_weight: float,
    iterations: int,
    seed: int,
) -> list[float]:
    """Pixel RMSE of each sample's reconstruction."""
    attack = GradientInversion(
        objective=Euclidean(),
        priors={"total_variation": TotalVariation(tv_weight)},
        optimizer=LBFGS(iterations=iterations),
        dtype="float64",
        batching="vmap",
    )
    private = data.batch(indices)
    observations = observe(
        gradient_map, params, private, private, BATCH, LEARNING_RATE, defense, seed
    )
    answers, _ = lab.run_attack(attack, gradient_map, data.spec, observations, STRONG, seed)
    values: list[float] = []
    for i, answer in enumerate(answers):
        truth = private[i * BATCH : (i + 1) * BATCH]
        values += lab.evaluate(answer, truth, data.spec, Evaluator())["rmse"]
    return values


def train_under(
    defense: Defense, seed: int, rounds: int, clients: int
) -> tuple[GradientMap, Trained]:
    """A network of its own for each seed, trained on the digits under a defense."""
    train_set, test_set = lab.load_datasets(None)
    model = initialize(
        LeNet(train_set.spec.shape, 10, num_convolutions=3, activation="tanh"),
        "xavier",
        make_generator(seed, purpose="model"),
    )
    gradient_map = GradientMap(model)
    trained = train(
        gradient_map,
        train_set,
        test_set,
        defense,
        rounds=rounds,
        clients=clients,
        batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        seed=seed,
        checkpoints=(0, rounds // 5),
    )
    return gradient_map, trained


@lru_cache
def undefended_accuracy(seed: int, rounds: int, clients: int) -> float:
    """What training without a defense reaches under the same draws."""
    return train_under(NoDefense(), seed, rounds, clients)[1].accuracy


def run_one(
    family: str, strength: float, seed: int, arguments: argparse.Namespace
) -> dict[str, object]:
    """Train under one defense, then attack its updates."""
    defense = FAMILIES[family][strength]
    train_set, _ = lab.load_datasets(None)
    gradient_map, trained = train_under(defense, seed, arguments.rounds, arguments.clients)
    baseline = undefended_accuracy(seed, arguments.rounds, arguments.clients)
    chosen = torch.randperm(len(train_set), generator=make_generator(seed, purpose="victims"))
    public, private = chosen[:8], chosen[8 : 8 + arguments.victims]
    by_round = {}
    for server_round, params in trained.checkpoints.items():

        def attack(indices: torch.Tensor, weight: float, here: Params = params) -> list[float]:
            return attack_rmse(
                gradient_map, here, train_set, indices, defense, weight, arguments.iterations, seed
            )

        weight = min(TV_WEIGHTS, key=lambda w: np.mean(attack(public, w)))
        values = attack(private, weight)
        pixel = train_set.std[0]
        predicted = [
            pixel * value
            for part in private.split(BATCH)
            for value in predicted_rmse(defense, gradient_map, params, train_set.batch(part), seed)
        ]
        by_round[server_round + 1] = {
            "tv_weight": weight,
            "mean": fmean(values),
            "worst_decile": fmean(sorted(values)[: max(1, len(values) // 10)]),
            "predicted_mean": fmean(predicted),
            "predicted_worst": min(predicted),
            "rmse": values,
        }
    return {
        "family": family,
        "strength": strength,
        "seed": seed,
        "accuracy": trained.accuracy,
        "accuracy_change": trained.accuracy - baseline,
        "train_cpu_seconds": trained.cpu_seconds,
        "rounds": by_round,
    }


def entries(rows: list[dict], *keys: str) -> list[float]:
    """The entry under ``keys`` of every run."""
    values = []
    for row in rows:
        for key in keys:
            row = row[key]
        values.append(float(row))  # type: ignore[arg-type]
    return values


def center(rows: list[dict], *keys: str) -> tuple[float, float, float]:
    """Return the mean over runs of the entry under ``keys``, and how far its range reaches."""
    values = entries(rows, *keys)
    mean = fmean(values)
    return mean, mean - min(values), max(values) - mean


def points(results: list[dict]) -> list[tuple[str, float, list[dict]]]:
    """Family, strength and the runs of each point of the frontiers."""
    groups: dict[tuple[str, float], list[dict]] = {}
    for row in results:
        groups.setdefault((row["family"], row["strength"]), []).append(row)
    return [(*key, groups[key]) for key in sorted(groups, key=lambda k: (order(k[0]), k[1]))]


def order(family: str) -> int:
    """Place of a family in tables and plots."""
    return list(FAMILIES).index(family)


def to_markdown(results: list[dict]) -> str:
    """Return a line for each point: means over seeds with their spread; RMSE in pixels."""
    rounds = list(results[0]["rounds"])
    columns = ["family", "strength", "n", "accuracy, %", "change, points"]
    for r in rounds:
        columns += [f"{what}, round {r}" for what in ("worst decile", "mean", "predicted mean")]
    columns.append("training, CPU s")
    lines = []
    for family, strength, rows in points(results):
        cells = [family, f"{strength:g}", str(len(rows))]
        for what in ("accuracy", "accuracy_change"):
            cells.append(lab.spread([100 * value for value in entries(rows, what)], 1))
        for r in rounds:
            for what in ("worst_decile", "mean", "predicted_mean"):
                cells.append(lab.spread(entries(rows, "rounds", r, what), 3))
        cells.append(f"{fmean(entries(rows, 'train_cpu_seconds')):.1f}")
        lines.append(cells)
    return lab.markdown(columns, lines)


def plot(results: list[dict], path: Path) -> None:
    """One panel for each attacked round: worst-decile RMSE against test accuracy."""
    rounds = list(results[0]["rounds"])
    figure, axes = plt.subplots(1, len(rounds), figsize=(6 * len(rounds), 4.2), squeeze=False)
    styles = {ISOTROPIC: "o-", "influence_noise": "s-"}
    for axis, r in zip(axes[0], rounds, strict=True):
        for name in FAMILIES:
            here = [rows for family, _, rows in points(results) if family == name]
            if not here:
                continue
            x, *x_range = zip(*(center(rows, "accuracy_change") for rows in here), strict=True)
            y, *y_range = zip(
                *(center(rows, "rounds", r, "worst_decile") for rows in here), strict=True
            )
            axis.errorbar(
                x, y, y_range, x_range, styles.get(name, "^--"), capsize=2, lw=1.5, label=name
            )
        axis.set(
            xlabel="change of test accuracy against training without a defense",
            ylabel="attack RMSE of the worst decile (pixel)",
            title=f"updates of round {r}: up and to the right is better",
        )
        axis.grid(alpha=0.3)
        axis.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run what the command line asks for."""
    parser = lab.command(__doc__)
    parser.add_argument("--output", type=Path, default=Path("frontier"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=120)
    arguments = lab.start(parser)
    warnings.simplefilter("ignore", UserWarning)
    data_path = arguments.output.with_suffix(".json")
    results = json.loads(data_path.read_text()) if data_path.exists() else []
    done = {(row["family"], row["strength"], row["seed"]) for row in results}
    for seed in arguments.seeds:
        for family, members in FAMILIES.items():
            for strength in members:
                if (family, strength, seed) in done:
                    continue
                row = json.loads(json.dumps(run_one(family, strength, seed, arguments)))
                results.append(row)
                data_path.write_text(json.dumps(results, indent=1))
                print(to_markdown([row]).splitlines()[-1], file=sys.stderr, flush=True)
        table = to_markdown(results)
        arguments.output.with_suffix(".md").write_text(table)
        plot(results, arguments.output.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
