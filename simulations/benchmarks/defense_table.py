"""Utility against leakage of the published defenses, in the form of Huang et al. 2021, table 2.

    python -m simulations.benchmarks.defense_table --data-root FOLDER --output defense_table

``FOLDER`` holds ``cifar10_train.npz`` and ``cifar10_test.npz`` (arrays ``images`` and
``labels``); without ``--data-root`` the embedded MNIST digits are used. For each defense, at the
paper's strengths: test accuracy and CPU time of training against none, then the attack on the
same private images in batches of 1, 16 and 32. The network has more parameters than a batch of 32
has pixels, so that a large batch is not hidden by counting alone. The attacker knows the labels
(soft ones too) and adapts: it compares the entries that were not pruned only, chooses the weight
of total variation on images of its own under the same defense, and decodes MixUp and InstaHide
from several epochs with the mapping and coefficients given (the paper's upper bound on leakage).

Rows are added to ``defense_table.json`` one by one, and those found there are not repeated;
``defense_table.md`` is made of all of them. ``--rows`` names some, so that two processes can
share the work.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

import torch

from flwr_leakage.attacks import LBFGS, Attack, Euclidean, GradientInversion, TotalVariation
from flwr_leakage.attacks.decode import decode_instahide, decode_mixup
from flwr_leakage.attacks.inversion.objectives import Masked
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import Chain, Defense, GradientPruning, InstaHide, MixUp, NoDefense
from flwr_leakage.defenses.mixing import draw_mixing
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import Batch, Reconstruction
from simulations.benchmarks import lab
from simulations.benchmarks.defense_lab import STRONG, observe, train
from simulations.benchmarks.defense_times import MIXING, first_images, ratios, step_block

LEARNING_RATE, MOMENTUM = 0.01, 0.9
BATCH_SIZES = (1, 16, 32)
TV_WEIGHTS = (1e-4, 1e-3, 1e-2)
PAPER_EPOCHS = 20  # the default of examples/attack_decode.py in the paper's code

DEFENSES: dict[str, Defense] = {
    "none": NoDefense(),
    **{f"pruning {p}": GradientPruning(p) for p in (0.5, 0.7, 0.9, 0.95, 0.99, 0.999)},
    **MIXING,
}


def inversion(tv_weight: float, batch_size: int, iterations: int) -> GradientInversion:
    """The attack; ``tv_weight`` is that of a batch of one.

    A sample's share of a mean gradient falls as 1 / B, so that its misfit falls as 1 / B², and
    its share of the mean total variation as 1 / B: the weight falls as 1 / B.
    """
    return GradientInversion(
        objective=Masked(Euclidean()),
        priors={"total_variation": TotalVariation(tv_weight / batch_size)},
        optimizer=LBFGS(iterations=iterations),
        batching="auto",
    )


def mixing_defense(defense: Defense) -> MixUp | InstaHide | None:
    """The part of a defense that mixes samples."""
    if isinstance(defense, Chain):
        return next((m for d in defense.defenses if (m := mixing_defense(d))), None)
    return defense if isinstance(defense, MixUp | InstaHide) else None


def mixing_matrix(
    mixer: MixUp | InstaHide, num_samples: int, seed: int, epoch: int
) -> torch.Tensor:
    """W of an epoch: drawn again from the seed that the client encoded with."""
    draws = Reproducible.from_seed(seed, server_round=epoch, purpose="encode")
    if isinstance(mixer, InstaHide):
        return mixer.draw_mixing(num_samples, draws).matrix(num_samples)
    return draw_mixing(num_samples, mixer.k, mixer.max_coefficient, draws).matrix(num_samples)


@dataclass(frozen=True)
class Study:
    """What every cell of the table needs."""

    gradient_map: GradientMap
    data: ImageDataset
    evaluator: Evaluator
    epochs: int
    seed: int

    def recover(
        self, defense: Defense, private: Batch, batch_size: int, attack: Attack, epoch: int
    ) -> tuple[Batch | None, float]:
        """Invert one epoch's gradients: its (encoded) images, and CPU seconds a batch."""
        spec = self.data.spec
        draws = Reproducible.from_seed(self.seed, server_round=epoch, purpose="encode")
        encoded = defense.on_batch(private, spec.num_classes, draws)
        observations = observe(
            self.gradient_map,
            self.gradient_map.params,
            private,
            encoded,
            batch_size,
            LEARNING_RATE,
            defense,
            self.seed + epoch,
        )
        answers, seconds = lab.run_attack(
            attack, self.gradient_map, spec, observations, STRONG, self.seed
        )
        found = [answer.batch.inputs for answer in answers if answer.batch is not None]
        complete = len(found) == len(answers)
        images = Batch(torch.cat(found), encoded.targets) if complete else None
        return images, seconds / len(observations)

    def reconstruct(
        self, defense: Defense, private: Batch, batch_size: int, attack: Attack
    ) -> tuple[Batch | None, float]:
        """Recover the private images, decoded where they are mixed; CPU seconds a batch."""
        mixer = mixing_defense(defense)
        encodings, weights, seconds = [], [], []
        for epoch in range(self.epochs if mixer else 1):
            found, spent = self.recover(defense, private, batch_size, attack, epoch)
            seconds.append(spent)
            if found is None:
                return None, fmean(seconds)
            if mixer is None:
                return found, spent
            encodings.append(found.inputs)
            weights.append(mixing_matrix(mixer, len(private), self.seed, epoch))
        if isinstance(mixer, InstaHide):
            generator = make_generator(self.seed, purpose="decode")
            images = decode_instahide(
                torch.cat(encodings), torch.cat(weights), self.data.spec, generator
            ).images
        else:
            images = decode_mixup(torch.cat(encodings), torch.cat(weights))
        return Batch(images, private.targets), fmean(seconds)

    def adapt(self, defense: Defense, public: Batch, iterations: int) -> float:
        """The total variation that best recovers the attacker's own encoded images, one by one."""
        draws = Reproducible.from_seed(self.seed, server_round=0, purpose="encode")
        truth = defense.on_batch(public, self.data.spec.num_classes, draws)
        errors: dict[float, float] = {}
        for weight in TV_WEIGHTS:
            found, _ = self.recover(defense, public, 1, inversion(weight, 1, iterations), 0)
            if found is not None:
                errors[weight] = float((found.inputs - truth.inputs).square().mean())
        return min(errors, key=lambda weight: errors[weight])

    def cell(
        self, defense: Defense, private: Batch, batch_size: int, attack: Attack
    ) -> dict[str, object]:
        """Average, best and spread of each metric at one attack batch size."""
        found, seconds = self.reconstruct(defense, private, batch_size, attack)
        answer = Reconstruction(found, 0.0, error="" if found else "the attack failed")
        values = lab.evaluate(answer, private, self.data.spec, self.evaluator)
        summary: dict[str, object] = {"attack_cpu_seconds_per_batch": seconds}
        for name, numbers in values.items():
            if not numbers or name == "label_accuracy":
                continue
            best = max(numbers) if name in ("psnr", "ssim") else min(numbers)
            summary[name] = {"mean": fmean(numbers), "best": best, "std": pstdev(numbers)}
        return summary


def to_markdown(rows: list[dict], distance: str) -> str:
    """The table: a line for each defense, columns for each attack batch size."""
    columns = ["defense", "accuracy", "time", "TV"]
    for b in BATCH_SIZES:
        columns += [f"{what} b={b}: avg / best / std" for what in (distance, "PSNR")]
    lines = []
    for row in rows:
        cells = [
            row["defense"],
            f"{100 * row['accuracy']:.1f} %",
            f"{row['time_ratio']:.2f}×",
            f"{row['tv_weight']:g}",
        ]
        for size in BATCH_SIZES:
            cell = row["cells"].get(str(size), {})
            for name, digits in ((distance, 3), ("psnr", 1)):
                numbers = cell.get(name)
                cells.append(
                    " / ".join(f"{numbers[k]:.{digits}f}" for k in ("mean", "best", "std"))
                    if numbers
                    else "—"
                )
        lines.append(cells)
    return lab.markdown(columns, lines)


def cost_table(rows: list[dict], num_samples: int) -> str:
    """CPU hours of attacking every sample, in the form of the paper's table 3.

    All samples once: seconds a batch · D / b. Encodings that change each epoch must be
    recovered T times: · T; the decoding itself is negligible beside.
    """
    lines = []
    for row in rows:
        mixed = mixing_defense(DEFENSES[row["defense"]]) is not None
        factor = PAPER_EPOCHS if mixed else 1
        hours = [
            f"{cell['attack_cpu_seconds_per_batch'] * num_samples / b * factor / 3600:.1f}"
            if (cell := row["cells"].get(str(b)))
            else "—"
            for b in BATCH_SIZES
        ]
        model = "t_b · T · D / b" if mixed else "t_b · D / b"
        lines.append([row["defense"], model, *hours])
    columns = ["defense", "cost", *(f"b={b}" for b in BATCH_SIZES)]
    caption = f"CPU hours for {num_samples:,} samples (D), T = {PAPER_EPOCHS} epochs:\n\n"
    return caption + lab.markdown(columns, lines)


def run_row(name: str, study: Study, test_set: ImageDataset, arguments: argparse.Namespace) -> dict:
    """Train under one defense, then attack the untrained network's gradients."""
    defense, data = DEFENSES[name], study.data
    trained = train(
        study.gradient_map,
        data,
        test_set,
        defense,
        rounds=arguments.training_epochs * (len(data) // 32),
        clients=1,
        batch_size=32,
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        seed=arguments.seed,
    )
    few = first_images(data, 256)
    blocks = {
        which: step_block(study.gradient_map.model, few, DEFENSES[which])
        for which in dict.fromkeys(("none", name))
    }
    chosen = torch.randperm(len(data), generator=make_generator(study.seed, purpose="victims"))
    public, private = data.batch(chosen[:6]), data.batch(chosen[8 : 8 + max(BATCH_SIZES)])
    weight = study.adapt(defense, public, arguments.iterations)
    cells = {}
    for size in arguments.batch_sizes:
        steps = arguments.iterations if size == 1 else arguments.batch_iterations
        attack = inversion(weight, size, steps)
        cells[str(size)] = study.cell(defense, private[: max(size, 16)], size, attack)
    return {
        "defense": name,
        "accuracy": trained.accuracy,
        "time_ratio": ratios(blocks, arguments.turns)[name][1],
        "tv_weight": weight,
        "cells": cells,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = lab.command(__doc__)
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--output", type=Path, default=Path("defense_table"))
    parser.add_argument("--rows", nargs="+", choices=list(DEFENSES), default=list(DEFENSES))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--lpips-backbone", default=None, help="SqueezeNet 1.1 weights")
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--training-epochs", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3, help="T, of recovered encodings")
    parser.add_argument("--iterations", type=int, default=100, help="on single images")
    parser.add_argument("--batch-iterations", type=int, default=200, help="on batches")
    parser.add_argument("--turns", type=int, default=10, help="of the timing of training")
    parser.add_argument("--seed", type=int, default=0)
    arguments = lab.start(parser)
    train_set, test_set = lab.load_datasets(arguments.data_root)
    spec = train_set.spec
    model = initialize(
        LeNet(spec.shape, spec.num_classes, arguments.channels, 3, activation="gelu"),
        "default",
        make_generator(arguments.seed, purpose="model"),
    )
    backbone = arguments.lpips_backbone
    evaluator = Evaluator(lpips=Lpips("squeeze", backbone) if backbone else None)
    study = Study(GradientMap(model), train_set, evaluator, arguments.epochs, arguments.seed)
    distance = "lpips_squeeze" if backbone else "rmse"
    data_path = arguments.output.with_suffix(".json")
    rows = json.loads(data_path.read_text()) if data_path.exists() else []
    for name in arguments.rows:
        if any(row["defense"] == name for row in rows):
            continue
        rows.append(run_row(name, study, test_set, arguments))
        rows.sort(key=lambda row: list(DEFENSES).index(row["defense"]))
        data_path.write_text(json.dumps(rows, indent=1))
        print(name, file=sys.stderr, flush=True)
    table = to_markdown(rows, distance) + "\n" + cost_table(rows, 50_000)
    arguments.output.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
