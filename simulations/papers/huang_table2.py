"""Huang et al. 2021, Table 2: accuracy against leakage of thirteen defenses."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from flwr_leakage.attacks import Adam, Cosine, GradientInversion, Normal, TotalVariation
from flwr_leakage.attacks.decode import decode_instahide, decode_mixup
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics
from flwr_leakage.defenses import Chain, GradientPruning, InstaHide, MixUp, NoDefense
from flwr_leakage.defenses.base import Defense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import InputSpec
from simulations.papers.findings import Findings, Row
from simulations.papers.huang_claims import PAPER, judge, leakage_figure
from simulations.papers.intervals import means
from simulations.papers.lab import Lab
from simulations.papers.training import Recipe, Trained
from simulations.papers.victims import (
    STRONGEST,
    Measures,
    observe_batches,
    reconstruct,
)

DEFENSES: Mapping[str, Defense] = {
    "none": NoDefense(),
    **{f"prune {p}": GradientPruning(p) for p in (0.5, 0.7, 0.9, 0.95, 0.99, 0.999)},
    "MixUp 4": MixUp(4),
    "MixUp 6": MixUp(6),
    "InstaHide 4": InstaHide(4),
    "InstaHide 6": InstaHide(6),
    "MixUp 4 + prune 0.9": Chain([MixUp(4), GradientPruning(0.9)]),
    "InstaHide 4 + prune 0.9": Chain([InstaHide(4), GradientPruning(0.9)]),
}
"""The thirteen rows of the paper's table; InstaHide is the intra version."""


def total_variation_weight(name: str) -> float:
    """The weight that the paper chose for a row (section 5.1); for no defense it states none."""
    if "InstaHide" in name:
        return 0.01
    return 0.1 if "MixUp" in name else 0.05


@dataclass(frozen=True)
class UtilityAgainstLeakage:
    """Huang et al. 2021, Table 2: what thirteen defenses cost and what they hide.

    A network is trained under each defense, then the gradients of the same images are attacked in
    batches of several sizes by the paper's attack: cosine distance, total variation, the private
    batch's BatchNorm statistics as a prior, Adam on signs. MixUp and InstaHide are decoded from
    the encodings of several epochs. LPIPS: lower is a better reconstruction, so more leakage.

    Attributes:
        data: a name of ``Lab.data``.
        network: a class of ``flwr_leakage.models``.
        options: its further arguments.
        epochs: of training.
        train_images: of training; ``None`` for all.
        batch_size: of training.
        learning_rate: of training.
        augment: shifts and mirrors in training.
        rows: names of ``DEFENSES``.
        images: attacked, the first from ``first`` on of the test set.
        first: of the attacked images.
        batch_sizes: of the attacked gradients.
        iterations: of the attack.
        statistics_weight: of the BatchNorm prior.
        decoding_epochs: whose encodings are decoded together.
        seeds: of training and attack; each trains anew.
    """

    data: str
    network: str
    epochs: int
    train_images: int | None
    rows: Sequence[str]
    images: int
    batch_sizes: Sequence[int]
    iterations: int
    decoding_epochs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    learning_rate: float = 0.1
    augment: bool = False
    first: int = 100
    statistics_weight: float = 1e-3
    seeds: Sequence[int] = (100,)

    def run(self, lab: Lab) -> Findings:
        """Train and attack under each defense."""
        samples: list[Row] = []
        table: list[Row] = []
        for name in self.rows:
            of_row: list[Row] = []
            accuracy: list[float] = []
            seconds: list[float] = []
            for seed in self.seeds:
                trained = lab.train(self._recipe(name, seed))
                accuracy.append(100 * trained.accuracy[self.epochs])
                seconds.append(trained.cpu_seconds)
                of_row += self._attacks(lab, name, seed, trained)
            samples += of_row
            table += self._cells(name, of_row, accuracy, seconds)
        base = next((r["training CPU s"] for r in table if r["defense"] == "none"), None)
        for row in table:
            spent = row.pop("training CPU s")
            ratio = spent / base if isinstance(base, float) and isinstance(spent, float) else None
            row["training time"] = ratio
        return Findings(
            table,
            judge(samples, table),
            {"huang_table2": leakage_figure(table, self.batch_sizes)},
            "single gradients, the labels (soft ones too), the private batch's BatchNorm "
            "statistics; for MixUp and InstaHide also which images were mixed, with which "
            "coefficients, in every epoch.",
            (
                "LPIPS of the paper: network not stated. Here: SqueezeNet, images enlarged to 64 "
                "pixels; values of the two are not comparable, orders are.",
                "Decoded images are measured for MixUp and InstaHide, as in the paper.",
                "Training time is CPU time, measured while other work shared the machine: whoever "
                "trains anew gets another one.",
                f"Trainings a defense: {len(self.seeds)}. Intervals are of images: they cover no "
                "other training and, where all images share a gradient, no other batch.",
            ),
        )

    def _recipe(self, name: str, seed: int) -> Recipe:
        return Recipe(
            network=self.network,
            data=self.data,
            epochs=self.epochs,
            seed=seed,
            options=self.options,
            num_images=self.train_images,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            augment=self.augment,
            defense=DEFENSES[name],
        )

    def _attacks(self, lab: Lab, name: str, seed: int, trained: Trained) -> list[Row]:
        found: list[Row] = []
        for batch_size in self.batch_sizes:
            settings = {**asdict(self), "rows": name, "seeds": seed, "batch_sizes": batch_size}

            def compute(size: int = batch_size) -> list[Row]:
                gradient_map = GradientMap(
                    trained.models[self.epochs], batch_norm="batch", device=lab.device
                )
                return self._attack(lab, name, seed, gradient_map, size)

            found += lab.rows(f"{name}, batch {batch_size}, seed {seed}", settings, compute)
        return found

    def _attack(
        self, lab: Lab, name: str, seed: int, gradient_map: GradientMap, batch_size: int
    ) -> list[Row]:
        defense = DEFENSES[name]
        dataset = lab.data(self.data)[1]
        spec = dataset.spec
        private = dataset.batch(torch.arange(self.first, self.first + self.images)).to(lab.device)
        attack = self._inversion(name)
        epochs = self.decoding_epochs if defense.encodes_batches else 1
        encodings, weights = [], []
        for epoch in range(1, epochs + 1):
            draws = partial(Reproducible.from_seed, seed, server_round=epoch, purpose="encode")
            encoded = defense.on_batch(private, spec.num_classes, draws())
            observations = observe_batches(
                gradient_map, encoded, batch_size, defense, seed, server_round=epoch
            )
            answers = reconstruct(attack, gradient_map, spec, observations, STRONGEST, seed)
            if any(answer.batch is None for answer in answers):
                return [{"defense": name, "batch": batch_size, "seed": seed, "lpips": None}]
            encodings.append(torch.cat([a.batch.inputs for a in answers if a.batch]))
            matrix = defense.mixing_matrix(len(private), draws())
            if matrix is not None:
                weights.append(matrix)
        found = encodings[0]
        if weights:
            found = decode(name, torch.cat(encodings), torch.cat(weights), spec, seed)
        # The order within a gradient is unknown; decoded images come in the mapping's order.
        together = 1 if weights else batch_size
        return Measures(lab.lpips).in_batches(
            found, private, together, spec, defense=name, batch=batch_size, seed=seed
        )

    def _inversion(self, name: str) -> GradientInversion:
        hides_signs = "InstaHide" in name
        return GradientInversion(
            objective=Cosine(),
            priors={
                "total_variation": TotalVariation(total_variation_weight(name), hides_signs),
                "statistics": BatchNormStatistics(self.statistics_weight),
            },
            initialisation=Normal(),
            optimizer=Adam(self.iterations, 0.1, sign="hard", decay="step"),
            box=not hides_signs,  # flipped signs lie outside of the pixels' box
        )

    def _cells(
        self, name: str, samples: Sequence[Row], accuracy: list[float], seconds: list[float]
    ) -> list[Row]:
        """A row for each batch size, the paper's cell beside."""
        rows: list[Row] = []
        for size in self.batch_sizes:
            mine = [row for row in samples if row["batch"] == size]
            cells: Row = {
                "defense": name,
                "batch": size,
                "accuracy %": sum(accuracy) / len(accuracy),
                "paper: accuracy %": PAPER[name].accuracy,
                "training CPU s": sum(seconds) / len(seconds),
                "paper: training time": PAPER[name].time,
                "n": len(mine),
                "paper: LPIPS": PAPER[name].lpips.get(size),
            }
            known = [float(v) for row in mine if (v := row.get("lpips")) is not None]
            best: Row = {"LPIPS best": min(known)} if known else {}
            rows.append(cells | means(mine, ("lpips", "psnr")) | best)
        return rows


def decode(
    name: str, encodings: torch.Tensor, weights: torch.Tensor, spec: InputSpec, seed: int
) -> torch.Tensor:
    """Images from the encodings of all epochs, the mixing given."""
    if "InstaHide" not in name:
        return decode_mixup(encodings, weights)
    generator = make_generator(seed, purpose="decoding")
    return decode_instahide(encodings, weights, spec, generator).images
