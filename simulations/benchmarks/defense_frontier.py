"""Leakage against accuracy: noise put where it hides most, against isotropic noise.

    python -m simulations.benchmarks.defense_frontier --output frontier

trains a LeNet with tanh on real MNIST digits under each defense and strength (8 clients, one
step on 4 samples a round), and lets a strong attacker (known labels, L-BFGS in float64, total
variation weight tuned on other digits under the same defense) invert batches of 4 at the first
and at a later round of that very run. It writes ``frontier.json`` and ``frontier.png``.
"""

import argparse
import json
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from flwr_leakage.attacks import LBFGS, Euclidean, GradientInversion, TotalVariation
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import Defense, GaussianNoise, InfluenceNoise, TargetRisk
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.params import Params
from flwr_leakage.randomness import make_generator
from simulations.benchmarks.defense_lab import invert, load_data, measure, observe, train

BATCH, LEARNING_RATE = 4, 0.1
TV_WEIGHTS = (1e-2, 1e-1)


def defenses(lanczos_steps: int) -> dict[str, list[tuple[float, Defense]]]:
    """Each family with its strengths, the weakest first."""
    steps = lanczos_steps
    return {
        "isotropic noise": [(s, GaussianNoise(s)) for s in (0.03, 0.1, 0.2, 0.4)],
        "influence_noise": [
            (s, InfluenceNoise(s, num_steps=steps)) for s in (0.01, 0.03, 0.1, 0.2)
        ],
        "target_risk (influence)": [
            (t, TargetRisk(t, "influence", num_steps=steps)) for t in (0.3, 0.5, 0.7, 0.9)
        ],
        "target_risk (gaussian)": [
            (t, TargetRisk(t, "gaussian", num_steps=steps)) for t in (0.3, 0.5, 0.7, 0.9)
        ],
    }


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
        priors=[TotalVariation(tv_weight)] if tv_weight else [],
        optimizer=LBFGS(iterations=iterations),
        dtype="float64",
        batching="vmap",
    )
    private = data.batch(indices)
    observations = observe(
        gradient_map, params, private, private, BATCH, LEARNING_RATE, defense, seed
    )
    answers, _ = invert(attack, gradient_map, data.spec, observations, seed)
    values: list[float] = []
    for i, answer in enumerate(answers):
        truth = private[i * BATCH : (i + 1) * BATCH]
        values += measure(answer, truth, data.spec, Evaluator())["rmse"]
    return values


def run_one(
    family: str, strength: float, defense: Defense, arguments: argparse.Namespace
) -> dict[str, object]:
    """Train under one defense, then attack its updates."""
    train_set, test_set = load_data(None)
    model = initialize(
        LeNet(train_set.spec.shape, 10, num_convolutions=3, activation="tanh"),
        "xavier",
        make_generator(arguments.seed, purpose="model"),
    )
    gradient_map = GradientMap(model)
    trained = train(
        gradient_map,
        train_set,
        test_set,
        defense,
        rounds=arguments.rounds,
        clients=arguments.clients,
        batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        seed=arguments.seed,
        checkpoints=(0, arguments.rounds // 5),
    )
    generator = make_generator(arguments.seed, purpose="victims")
    chosen = torch.randperm(len(train_set), generator=generator)
    public, private = chosen[:8], chosen[8 : 8 + arguments.victims]
    by_round = {}
    for server_round, params in trained.checkpoints.items():

        def attack(indices: torch.Tensor, weight: float, here: Params = params) -> list[float]:
            return attack_rmse(
                gradient_map,
                here,
                train_set,
                indices,
                defense,
                weight,
                arguments.iterations,
                arguments.seed,
            )

        weight = min(TV_WEIGHTS, key=lambda w: np.mean(attack(public, w)))
        values = attack(private, weight)
        tenth = sorted(values)[: max(1, len(values) // 10)]
        by_round[server_round] = {
            "tv_weight": weight,
            "rmse": values,
            "mean": float(np.mean(values)),
            "worst_decile": float(np.mean(tenth)),
        }
    return {
        "family": family,
        "strength": strength,
        "accuracy": trained.accuracy,
        "train_cpu_seconds": trained.cpu_seconds,
        "rounds": by_round,
    }


def plot(results: list[dict], path: Path) -> None:
    """One panel for each attacked round: worst-decile RMSE against test accuracy."""
    rounds = list(results[0]["rounds"])
    figure, axes = plt.subplots(1, len(rounds), figsize=(6 * len(rounds), 4.2), squeeze=False)
    styles = {"isotropic noise": "o-", "influence_noise": "s-"}
    for axis, server_round in zip(axes[0], rounds, strict=True):
        for family in dict.fromkeys(r["family"] for r in results):
            rows = [r for r in results if r["family"] == family]
            axis.plot(
                [r["accuracy"] for r in rows],
                [r["rounds"][server_round]["worst_decile"] for r in rows],
                styles.get(family, "^--"),
                label=family,
            )
        axis.set(
            xlabel="test accuracy after training",
            ylabel="attack RMSE of the worst decile (pixel)",
            title=f"updates of round {int(server_round) + 1}: up and to the right is better",
        )
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("frontier"))
    parser.add_argument("--family", default=None, help="run this family only, and add to the file")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--lanczos-steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    data_path = arguments.output.with_suffix(".json")
    results = json.loads(data_path.read_text()) if arguments.family and data_path.exists() else []
    for family, members in defenses(arguments.lanczos_steps).items():
        if arguments.family not in (None, family):
            continue
        results = [r for r in results if r["family"] != family]
        for strength, defense in members:
            row = run_one(family, strength, defense, arguments)
            results.append(json.loads(json.dumps(row)))
            shown = "  ".join(
                f"round {int(k) + 1}: worst decile {v['worst_decile']:.3f}, mean {v['mean']:.3f} "
                f"(TV {v['tv_weight']:g})"
                for k, v in results[-1]["rounds"].items()
            )
            print(
                f"{family:24s} {strength:<6g} accuracy {row['accuracy']:.3f}  {shown}  "
                f"training {row['train_cpu_seconds']:.1f} s",
                flush=True,
            )
            data_path.write_text(json.dumps(results, indent=1))
    plot(results, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
