"""Huang et al. 2021, Figure 2: how often labels repeat, and what knowing them is worth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from flwr_leakage.attacks import (
    Adam,
    AutomaticLabels,
    Cosine,
    GradientInversion,
    Normal,
    TotalVariation,
)
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics
from flwr_leakage.defenses import NoDefense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import ThreatModel
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.intervals import means, share_interval
from simulations.papers.judge import by_difference, by_sign
from simulations.papers.lab import Lab
from simulations.papers.training import Recipe
from simulations.papers.victims import Measures, observe_batches, reconstruct

KNOWLEDGE = ("known", "optimised with the images", "counted from the last layer")
"""The first two are the paper's."""


def probability_of_no_repetition(batch_size: int, num_classes: int) -> float:
    """``K! / ((K − b)! Kᵇ)``: that b labels of K equally likely classes all differ.

    Example:
        >>> round(probability_of_no_repetition(4, 10), 3), probability_of_no_repetition(11, 10)
        (0.504, 0.0)
    """
    return math.prod(max(num_classes - i, 0) / num_classes for i in range(batch_size))


@dataclass(frozen=True)
class KnownLabels:
    """Huang et al. 2021, Figure 2: repeated labels, and labels known or optimised.

    First, how often a random batch has no class twice, by its size, which is what attacks that
    infer labels from the last layer rely on. Then the same gradients of 16 images attacked with
    labels given, with label logits optimised together with the images, and with labels counted
    from the last layer.

    Attributes:
        data: a name of ``Lab.data``.
        network: a class of ``flwr_leakage.models``.
        options: its further arguments.
        epochs: of training.
        train_images: of training; ``None`` for all.
        batch_size: of training.
        drawn_sizes: batch sizes of the first part.
        draws: batches of each size.
        images: attacked in all, the first from ``first`` on of the test set.
        first: of the attacked images.
        attacked_batch: images in a gradient.
        iterations: of the attack.
        statistics_weight: of the prior of the private batch's BatchNorm statistics.
        seeds: of training, draws and attack.
    """

    data: str
    network: str
    epochs: int
    train_images: int | None
    drawn_sizes: Sequence[int]
    draws: int
    images: int
    attacked_batch: int
    iterations: int
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    first: int = 100
    statistics_weight: float = 1e-3
    seeds: Sequence[int] = (100,)

    def run(self, lab: Lab) -> Findings:
        """Draw batches, then attack with each knowledge of the labels."""
        drawn = lab.rows("repetitions", asdict(self), partial(self._draw, lab))
        samples: list[Row] = []
        for seed in self.seeds:
            recipe = Recipe(
                network=self.network,
                data=self.data,
                epochs=self.epochs,
                seed=seed,
                options=self.options,
                num_images=self.train_images,
                batch_size=self.batch_size,
            )
            gradient_map = GradientMap(
                lab.train(recipe).models[self.epochs], batch_norm="batch", device=lab.device
            )
            for labels in KNOWLEDGE:
                settings = {**asdict(self), "seeds": seed, "labels": labels}
                compute = partial(self._attack, lab, labels, gradient_map, seed)
                samples += lab.rows(f"labels {labels}, seed {seed}", settings, compute)
        attacked: list[Row] = []
        for labels in KNOWLEDGE:
            mine = [row for row in samples if row["labels"] == labels]
            cells: Row = {"what": f"labels {labels}", "n": len(mine), "paper": "images only"}
            names = ("label_accuracy", "lpips", "psnr", "ssim")
            attacked.append(cells | means(mine, names))
        metric = "psnr" if lab.lpips is None else "lpips"
        shares = self._shares(drawn)
        return Findings(
            shares + attacked,
            (*self._judge_draws(drawn), *_judge_attacks(samples, metric)),
            {"huang_labels": _figure(shares, attacked, metric)},
            "single gradients, the private batch's BatchNorm statistics as a prior, and of the "
            "labels what each row says.",
            ("The paper prints no number of either part: its plot and images are judged.",),
        )

    def _draw(self, lab: Lab) -> list[Row]:
        labels = lab.data(self.data)[0].labels
        generator = make_generator(self.seeds[0], purpose="label repetition")
        rows: list[Row] = []
        for size in self.drawn_sizes:
            differ = 0
            for _ in range(self.draws):
                chosen = labels[torch.randint(len(labels), (size,), generator=generator)]
                differ += int(len(chosen.unique()) == size)
            num_classes = lab.data(self.data)[0].spec.num_classes
            expected = probability_of_no_repetition(size, num_classes)
            rows.append({"batch": size, "unique": differ, "expected": expected})
        return rows

    def _attack(self, lab: Lab, labels: str, gradient_map: GradientMap, seed: int) -> list[Row]:
        dataset = lab.data(self.data)[1]
        private = dataset.batch(torch.arange(self.first, self.first + self.images)).to(lab.device)
        seen = observe_batches(gradient_map, private, self.attacked_batch, NoDefense(), seed)
        known: Literal["known", "inferred"] = "known" if labels == "known" else "inferred"
        attack = GradientInversion(
            objective=Cosine(),
            priors={
                "total_variation": TotalVariation(0.05),
                "statistics": BatchNormStatistics(self.statistics_weight),
            },
            labels="joint" if labels == KNOWLEDGE[1] else AutomaticLabels(),
            initialisation=Normal(),
            optimizer=Adam(self.iterations, 0.1, sign="hard", decay="step"),
        )
        threat = ThreatModel(labels=known, batch_norm="exact")
        answers = reconstruct(attack, gradient_map, dataset.spec, seen, threat, seed)
        rows: list[Row] = []
        for first, answer in zip(range(0, len(private), self.attacked_batch), answers, strict=True):
            truth = private[first : first + self.attacked_batch]
            found = Measures(lab.lpips).of(answer, truth, dataset.spec, labels=labels, seed=seed)
            rows += [{**row, "sample": first + i} for i, row in enumerate(found)]
        return rows

    def _shares(self, drawn: Sequence[Row]) -> list[Row]:
        rows: list[Row] = []
        for row in drawn:
            share, low, high = self._interval(row)
            rows.append(
                {
                    "what": f"no class twice, batch {row['batch']}",
                    "n": self.draws,
                    "paper": "plot only",
                    "share": share,
                    "share low": low,
                    "share high": high,
                    "formula": row["expected"],
                }
            )
        return rows

    def _interval(self, row: Row) -> tuple[float, float, float]:
        return share_interval(int(row["unique"] or 0), self.draws)

    def _judge_draws(self, drawn: Sequence[Row]) -> list[Claim]:
        """Whether less than half of the larger batches have unique labels."""
        claims = []
        for row in drawn:
            size = int(row["batch"] or 0)
            if size < 8:
                continue
            share, low, high = self._interval(row)
            claims.append(
                by_sign(
                    f"Labels repeat in most batches of {size}: share without a repetition less a "
                    f"half (Fig. 2a).",
                    "plot only",
                    (share - 0.5, low - 0.5, high - 0.5),
                    self.draws,
                    -1.0,
                )
            )
        return claims


def _judge_attacks(samples: Sequence[Row], metric: str) -> list[Claim]:
    def values(labels: str) -> list[float | None]:
        mine = [row for row in samples if row["labels"] == labels]
        return [None if (v := row.get(metric)) is None else float(v) for row in mine]

    sign = 1.0 if metric == "lpips" else -1.0
    return [
        by_difference(
            f"Labels that are {labels} recover less than known ones: difference of "
            f"{metric.upper()} ({place}).",
            sign,
            values(labels),
            values("known"),
            "images only",
        )
        for labels, place in zip(KNOWLEDGE[1:], ("Fig. 2b", "section 3"), strict=True)
    ]


def _figure(shares: Sequence[Row], attacked: Sequence[Row], metric: str) -> Figure:
    figure = Figure(figsize=(7.5, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [str(row["what"]).rpartition(" ")[2] for row in shares]
    left.plot(names, [float(row["formula"] or 0) for row in shares], "-", label="formula")
    left.plot(names, [float(row["share"] or 0) for row in shares], "o", label="drawn")
    left.set_xlabel("batch size")
    left.set_ylabel("share without a class twice")
    left.legend(fontsize=7)
    known = [row for row in attacked if row.get(metric) is not None]
    for place, row in enumerate(known):
        low, mean, high = (float(row[k] or 0) for k in (f"{metric} low", metric, f"{metric} high"))
        right.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color="C0")
    right.set_yticks(range(len(known)), [str(row["what"]) for row in known], fontsize=7)
    right.set_xlabel(metric.upper())
    return figure
