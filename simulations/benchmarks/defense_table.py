"""Utility against leakage of the published defenses, in the form of Huang et al. 2021, table 2.

    python -m simulations.benchmarks.defense_table --data-root FOLDER --output defense_table

``FOLDER`` holds ``cifar10_train.npz`` and ``cifar10_test.npz`` (arrays ``images`` and
``labels``); without ``--data-root`` the embedded MNIST digits are used. For each defense, at the
paper's strengths: test accuracy and CPU time of training against none, then the attack on the
same private images in batches of 1, 16 and 32. The attacker knows the labels (soft ones too) and
adapts: it compares the entries that were not pruned only, chooses objective, optimizer and total
variation by their PSNR on images of its own under the same defense, and decodes MixUp and
InstaHide from several epochs with the mapping and coefficients given (the paper's upper bound on
leakage). It writes ``defense_table.json`` and ``defense_table.md``.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import torch

from flwr_leakage.attacks import (
    LBFGS,
    Adam,
    Attack,
    Cosine,
    Euclidean,
    GradientInversion,
    TotalVariation,
)
from flwr_leakage.attacks.decode import decode_instahide, decode_mixup
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import (
    Chain,
    Defense,
    GaussianNoise,
    GradientPruning,
    InstaHide,
    LaplacianNoise,
    MixUp,
    NoDefense,
    draw_mixing,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.params import Params
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, Reconstruction
from simulations.benchmarks.defense_lab import Masked, invert, load_data, measure, observe, train

LEARNING_RATE = 0.05
BATCH_SIZES = (1, 16, 32)
PAPER_EPOCHS = 20  # examples/attack_decode.py of the paper's code

DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    **{f"pruning {p}": GradientPruning(p) for p in (0.5, 0.7, 0.9, 0.95, 0.99, 0.999)},
    "MixUp 4": MixUp(4),
    "MixUp 6": MixUp(6),
    "Intra-InstaHide 4": InstaHide(4),
    "Intra-InstaHide 6": InstaHide(6),
    "MixUp 4 + pruning 0.9": Chain([MixUp(4), GradientPruning(0.9)]),
    "Intra-InstaHide 4 + pruning 0.9": Chain([InstaHide(4), GradientPruning(0.9)]),
}

TIMED: dict[str, Defense] = {
    **DEFENSES,
    "Gaussian noise 0.1": GaussianNoise(0.1),
    "Laplacian noise 0.1": LaplacianNoise(0.1),
}


def recipes(iterations: int) -> dict[str, Attack]:
    """What the attacker chooses from."""

    def lbfgs(tv_weight: float) -> GradientInversion:
        return GradientInversion(
            objective=Masked(Euclidean()),
            priors=[TotalVariation(tv_weight)] if tv_weight else [],
            optimizer=LBFGS(iterations=iterations),
            dtype="float64",
            batching="vmap",
        )

    return {
        "L2, L-BFGS": lbfgs(0.0),
        "L2, L-BFGS, TV 1e-3": lbfgs(1e-3),
        "L2, L-BFGS, TV 1e-2": lbfgs(1e-2),
        "cosine, Adam sign, TV 1e-2": GradientInversion(
            objective=Masked(Cosine()),
            priors=[TotalVariation(1e-2)],
            optimizer=Adam(2 * iterations, 0.1, "hard", "step"),
            batching="vmap",
        ),
    }


def mixing_defense(defense: Defense) -> MixUp | InstaHide | None:
    """The part of a defense that mixes samples."""
    if isinstance(defense, Chain):
        return next((m for d in defense.defenses if (m := mixing_defense(d))), None)
    return defense if isinstance(defense, MixUp | InstaHide) else None


def mixing_matrix(
    mixer: MixUp | InstaHide, num_samples: int, seed: int, epoch: int
) -> torch.Tensor:
    """W of an epoch: drawn again from the generator that the client encoded with."""
    generator = make_generator(seed, server_round=epoch, purpose="encode")
    if isinstance(mixer, InstaHide):
        return mixer.draw_mixing(num_samples, generator).matrix(num_samples)
    return draw_mixing(num_samples, mixer.k, mixer.max_coefficient, generator).matrix(num_samples)


@dataclass(frozen=True)
class Lab:
    """What every cell of the table needs."""

    gradient_map: GradientMap
    params: Params
    data: ImageDataset
    evaluator: Evaluator
    epochs: int
    seed: int

    def reconstruct(
        self, defense: Defense, private: Batch, batch_size: int, attack: Attack, epochs: int
    ) -> tuple[Batch | None, list[Batch], float]:
        """Recovered images (decoded where mixed), encodings of each epoch, seconds a batch."""
        spec, mixer = self.data.spec, mixing_defense(defense)
        encodings: list[Batch] = []
        weights, seconds, batches = [], 0.0, 0
        for epoch in range(epochs if mixer else 1):
            generator = make_generator(self.seed, server_round=epoch, purpose="encode")
            encoded = defense.on_batch(private, spec.num_classes, generator)
            observations = observe(
                self.gradient_map,
                self.params,
                private,
                encoded,
                batch_size,
                LEARNING_RATE,
                defense,
                self.seed + epoch,
            )
            answers, spent = invert(attack, self.gradient_map, spec, observations, self.seed)
            seconds, batches = seconds + spent, batches + len(observations)
            if any(answer.batch is None for answer in answers):
                return None, [], seconds / batches
            found = torch.cat([a.batch.inputs for a in answers if a.batch is not None])
            encodings.append(Batch(found, encoded.targets))
            if mixer:
                weights.append(mixing_matrix(mixer, len(private), self.seed, epoch))
        if mixer is None:
            return encodings[0], encodings, seconds / batches
        stacked = torch.cat([e.inputs for e in encodings])
        if isinstance(mixer, InstaHide):
            generator = make_generator(self.seed, purpose="decode")
            images = decode_instahide(stacked, torch.cat(weights), spec, generator).images
        else:
            images = decode_mixup(stacked, torch.cat(weights))
        return Batch(images, private.targets), encodings, seconds / batches

    def adapt(self, defense: Defense, public: Batch, iterations: int) -> str:
        """The recipe that best recovers the attacker's own (encoded) images in batches of 1."""
        scores: dict[str, float] = {}
        generator = make_generator(self.seed, server_round=0, purpose="encode")
        truth = defense.on_batch(public, self.data.spec.num_classes, generator)
        for name, attack in recipes(iterations).items():
            _, encodings, _ = self.reconstruct(defense, public, 1, attack, 1)
            if not encodings:
                continue
            error = (encodings[0].inputs - truth.inputs).square().mean().sqrt()
            scores[name] = float(error)
        return min(scores, key=lambda name: scores[name])

    def cell(
        self, defense: Defense, private: Batch, batch_size: int, attack: Attack
    ) -> dict[str, object]:
        """Average, best and spread of each metric at one attack batch size."""
        found, _, seconds = self.reconstruct(defense, private, batch_size, attack, self.epochs)
        answer = Reconstruction(found, 0.0, error="" if found else "the attack failed")
        values = measure(answer, private, self.data.spec, self.evaluator)
        summary: dict[str, object] = {"attack_cpu_seconds_per_batch": seconds}
        for name, numbers in values.items():
            if not numbers or name == "label_accuracy":
                continue
            best = max(numbers) if name in ("psnr", "ssim") else min(numbers)
            summary[name] = {"mean": fmean(numbers), "best": best, "std": pstdev(numbers)}
        return summary


def training_time_ratios(
    gradient_map: GradientMap,
    data: ImageDataset,
    test_set: ImageDataset,
    seed: int,
    repeats: int,
) -> dict[str, float]:
    """CPU time of an epoch of training against none: the least of repeats that take turns."""
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    few = ImageDataset(
        test_set.name,
        test_set.images[:1],
        test_set.labels[:1],
        test_set.class_names,
        test_set.mean,
        test_set.std,
    )
    for _ in range(repeats):
        for name, defense in TIMED.items():
            trained = train(
                gradient_map,
                data,
                few,
                defense,
                rounds=len(data) // 32,
                clients=1,
                batch_size=32,
                learning_rate=LEARNING_RATE,
                seed=seed,
            )
            times[name].append(trained.cpu_seconds)
    return {name: min(values) / min(times["none"]) for name, values in times.items()}


def to_markdown(rows: list[dict], distance: str) -> str:
    """The table: a line for each defense, columns for each attack batch size."""
    header = "| defense | accuracy | time | attack |" + "".join(
        f" {distance} b={b}: avg / best / std | PSNR b={b}: avg / best / std |" for b in BATCH_SIZES
    )
    lines = [header, "|" + "---|" * (4 + 2 * len(BATCH_SIZES))]
    for row in rows:
        cells = [
            row["defense"],
            f"{100 * row['accuracy']:.1f} %",
            f"{row['time_ratio']:.2f}×",
            row["recipe"],
        ]
        for size in BATCH_SIZES:
            cell = row["cells"][str(size)]
            for name, digits in ((distance, 3), ("psnr", 1)):
                numbers = cell.get(name)
                cells.append(
                    " / ".join(f"{numbers[k]:.{digits}f}" for k in ("mean", "best", "std"))
                    if numbers
                    else "—"
                )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cost_table(rows: list[dict], num_samples: int) -> str:
    """CPU hours of attacking every sample, in the form of the paper's table 3.

    All samples once: seconds a batch · D / b. Encodings that change each epoch must be
    recovered T times: · T; the decoding itself is negligible beside.
    """
    lines = [
        f"CPU hours for {num_samples:,} samples (D), T = {PAPER_EPOCHS} epochs:\n",
        "| defense | cost | b=1 | b=16 | b=32 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mixed = mixing_defense(DEFENSES[row["defense"]]) is not None
        factor = PAPER_EPOCHS if mixed else 1
        hours = [
            row["cells"][str(b)]["attack_cpu_seconds_per_batch"] * num_samples / b * factor / 3600
            for b in BATCH_SIZES
        ]
        model = "t_b · T · D / b" if mixed else "t_b · D / b"
        lines.append(
            f"| {row['defense']} | {model} | " + " | ".join(f"{h:.1f}" for h in hours) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--output", type=Path, default=Path("defense_table"))
    parser.add_argument("--lpips-backbone", default=None, help="SqueezeNet 1.1 weights")
    parser.add_argument("--training-epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3, help="T, of recovered encodings")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3, help="of the timing of training")
    parser.add_argument("--only-times", action="store_true", help="time training, and stop")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train_set, test_set = load_data(arguments.data_root)
    model = initialize(
        LeNet(train_set.spec.shape, train_set.spec.num_classes, 12, 3, activation="tanh"),
        "xavier",
        make_generator(arguments.seed, purpose="model"),
    )
    gradient_map = GradientMap(model)
    lpips = arguments.lpips_backbone and Lpips("squeeze", arguments.lpips_backbone)
    lab = Lab(
        gradient_map,
        gradient_map.params,
        train_set,
        Evaluator(lpips=lpips or None),
        arguments.epochs,
        arguments.seed,
    )
    distance = "lpips_squeeze" if lpips else "rmse"
    generator = make_generator(arguments.seed, purpose="victims")
    chosen = torch.randperm(len(train_set), generator=generator)
    public = train_set.batch(chosen[:6])
    private = train_set.batch(chosen[8 : 8 + arguments.images])
    ratios = training_time_ratios(
        gradient_map, train_set, test_set, arguments.seed, arguments.repeats
    )
    for name, ratio in ratios.items():
        print(f"training time of {name}: {ratio:.2f}×")
    if arguments.only_times:
        return
    rows: list[dict] = []
    for name, defense in DEFENSES.items():
        trained = train(
            gradient_map,
            train_set,
            test_set,
            defense,
            rounds=arguments.training_epochs * (len(train_set) // 32),
            clients=1,
            batch_size=32,
            learning_rate=LEARNING_RATE,
            seed=arguments.seed,
        )
        recipe = lab.adapt(defense, public, arguments.iterations)
        attack = recipes(arguments.iterations)[recipe]
        rows.append(
            {
                "defense": name,
                "accuracy": trained.accuracy,
                "time_ratio": ratios[name],
                "recipe": recipe,
                "cells": {
                    str(size): lab.cell(defense, private, size, attack) for size in BATCH_SIZES
                },
            }
        )
        print(to_markdown(rows[-1:], distance).splitlines()[-1], flush=True)
        arguments.output.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    table = to_markdown(rows, distance) + "\n" + cost_table(rows, 50_000)
    arguments.output.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
