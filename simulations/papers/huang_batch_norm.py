"""Huang et al. 2021, Figure 1: what knowledge of BatchNorm's statistics is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

from flwr_leakage.attacks import Adam, Cosine, GradientInversion, Normal, TotalVariation
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics
from flwr_leakage.defenses import NoDefense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import ThreatModel
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.intervals import means
from simulations.papers.judge import by_difference
from simulations.papers.lab import Lab
from simulations.papers.parts import blocks
from simulations.papers.training import Recipe
from simulations.papers.victims import (
    Measures,
    grey,
    observe_batches,
    reconstruct,
)

VARIANTS = (
    "BN_exact",
    "exact as a prior",
    "BN_infer",
    "BN_proxy",
    "nothing known",
    "grey",
)
"""Three of the paper, two beside them, and pixels of 0.5, which take no gradient."""

ORDERS = (
    ("BN_exact", "BN_infer", "Exact statistics recover more than inferred ones"),
    ("BN_infer", "BN_proxy", "Inferred statistics recover more than proxies"),
    ("BN_proxy", "grey", "Proxies recover something, if poorly"),
    ("exact as a prior", "BN_infer", "Exact statistics as a prior recover more than inferred ones"),
)
"""(better, worse, words), of the paper's Fig. 1; the last is of the authors' code."""


@dataclass(frozen=True)
class KnownStatistics:
    """Huang et al. 2021, Figure 1: BN_exact, BN_infer and BN_proxy.

    Clients train in train mode, so that their batch's own statistics normalise. BN_exact: the
    candidate is normalised by the private batch's statistics. BN_proxy: by the final running ones,
    as released with the trained model, and nothing else changes. BN_infer: by its own, with the
    final running ones as a prior. Beside them: the private batch's statistics as a prior only, as
    in the authors' published code, and no knowledge at all.

    Attributes:
        data: a name of ``Lab.data``.
        network: a class of ``flwr_leakage.models``.
        options: its further arguments.
        epochs: of training; the final running statistics are those of the last.
        attacked: epochs whose weights are attacked.
        train_images: of training; ``None`` for all.
        batch_size: of training.
        images: attacked in all, the first from ``first`` on of the test set.
        first: of the attacked images.
        attacked_batch: images in a gradient.
        iterations: of the attack.
        infer_weight: of BN_infer's prior.
        exact_weight: of the private statistics as a prior.
        seeds: of training and attack.
    """

    data: str
    network: str
    epochs: int
    attacked: Sequence[int]
    train_images: int | None
    images: int
    attacked_batch: int
    iterations: int
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    first: int = 100
    infer_weight: float = 1e-3
    exact_weight: float = 1e-3
    seeds: Sequence[int] = (100,)

    def run(self, lab: Lab) -> Findings:
        """Attack the same gradients with each knowledge."""
        samples: list[Row] = []
        for seed in self.seeds:
            trained = lab.train(self._recipe(seed)).models
            final = GradientMap(trained[self.epochs], batch_norm="batch", device=lab.device).buffers
            for epoch in self.attacked:
                gradient_map = GradientMap(trained[epoch], batch_norm="batch", device=lab.device)
                for variant in VARIANTS:
                    for first, images in blocks(self.first, self.images, 32):
                        one = replace(self, first=first, images=images)
                        settings = {**asdict(one), "seeds": seed, "attacked": epoch, "is": variant}
                        compute = partial(
                            one._attack, lab, variant, gradient_map, dict(final), seed, epoch
                        )
                        name = f"{variant}, epoch {epoch}, seed {seed}"
                        samples += lab.rows(name, settings, compute)
        metric = "psnr" if lab.lpips is None else "lpips"
        table = [
            self._cells([r for r in samples if r["knowledge"] == name and r["epoch"] == epoch])
            for epoch in self.attacked
            for name in VARIANTS
        ]
        return Findings(
            table,
            tuple(
                judge(samples, epoch, metric, better, worse, words)
                for epoch in self.attacked
                for better, worse, words in ORDERS
            ),
            {"huang_batch_norm": _figure(table, metric)},
            "single gradients and the labels; of BatchNorm's statistics what each row says.",
            (
                "The paper shows images only; its order is judged by pairs of images here.",
                "Exact statistics as constants give another gradient than the client's at the "
                "truth too, as the client differentiates through its batch's statistics.",
            ),
        )

    def _recipe(self, seed: int) -> Recipe:
        return Recipe(
            network=self.network,
            data=self.data,
            epochs=self.epochs,
            seed=seed,
            options=self.options,
            checkpoints=tuple(epoch for epoch in self.attacked if epoch != self.epochs),
            num_images=self.train_images,
            batch_size=self.batch_size,
        )

    def _attack(
        self,
        lab: Lab,
        variant: str,
        gradient_map: GradientMap,
        final: Params,
        seed: int,
        epoch: int,
    ) -> list[Row]:
        dataset = lab.data(self.data)[1]
        spec = dataset.spec
        private = dataset.batch(torch.arange(self.first, self.first + self.images)).to(lab.device)
        inputs = grey(spec, len(private))
        if variant != "grey":
            seen = observe_batches(
                gradient_map, private, self.attacked_batch, NoDefense(), seed, buffers=final
            )
            attack, threat = self._inversion(variant)
            answers = reconstruct(attack, gradient_map, spec, seen, threat, seed)
            found = [answer.batch.inputs for answer in answers if answer.batch is not None]
            if len(found) < len(answers):
                raise RuntimeError(f"{variant} failed: {[a.error for a in answers if a.error]}")
            inputs = torch.cat(found)
        return Measures(lab.lpips).in_batches(
            inputs, private, self.attacked_batch, spec, knowledge=variant, epoch=epoch, seed=seed
        )

    def _inversion(self, variant: str) -> tuple[GradientInversion, ThreatModel]:
        """The attack of a variant, and what it is granted."""
        prior: BatchNormStatistics | None = None
        normalize_by: Literal["candidate", "granted", "running"] = "candidate"
        threat = ThreatModel(labels="known")
        match variant:
            case "BN_exact":
                normalize_by = "granted"
                threat = ThreatModel(labels="known", batch_norm="exact")
            case "exact as a prior":
                prior = BatchNormStatistics(self.exact_weight)
                threat = ThreatModel(labels="known", batch_norm="exact")
            case "BN_infer":
                prior = BatchNormStatistics(self.infer_weight, known="running")
            case "BN_proxy":
                normalize_by = "running"
        priors = {"total_variation": TotalVariation(0.05)}
        attack = GradientInversion(
            objective=Cosine(),
            priors=priors if prior is None else {**priors, "statistics": prior},
            initialisation=Normal(),
            optimizer=Adam(self.iterations, 0.1, sign="hard", decay="step"),
            normalize_by=normalize_by,
        )
        return attack, threat

    def _cells(self, rows: Sequence[Row]) -> Row:
        """A line of the table; the paper has images only."""
        cells: Row = {
            "knowledge": rows[0]["knowledge"],
            "epoch": rows[0]["epoch"],
            "paper": "images only",
            "n": len(rows),
        }
        return cells | means(rows, ("lpips", "psnr", "ssim"))


def judge(
    samples: Sequence[Row], epoch: int, metric: str, better: str, worse: str, words: str
) -> Claim:
    """Whether one knowledge recovers more than another, over pairs of images."""

    def values(name: str) -> list[float | None]:
        mine = [r for r in samples if r["knowledge"] == name and r["epoch"] == epoch]
        return [None if (v := row.get(metric)) is None else float(v) for row in mine]

    text = f"{words}: difference of {metric.upper()}, epoch {epoch} (Fig. 1)."
    sign = -1.0 if metric == "lpips" else 1.0
    return by_difference(text, sign, values(better), values(worse), "images only")


def _figure(table: Sequence[Row], metric: str) -> Figure:
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['knowledge']}, epoch {row['epoch']}" for row in table]
    middle = [float(row[metric] or 0) for row in table]
    low = [m - float(row[f"{metric} low"] or 0) for m, row in zip(middle, table, strict=True)]
    high = [float(row[f"{metric} high"] or 0) - m for m, row in zip(middle, table, strict=True)]
    axes.errorbar(middle, range(len(names)), xerr=[low, high], fmt="o")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    better = "lower" if metric == "lpips" else "higher"
    axes.set_xlabel(f"{metric.upper()} ({better}: better recovered), mean and 95 % interval")
    return figure
