"""The angular Lipschitz study: leakage over training, by width and skips."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulations.papers.alc_figure import over_training
from simulations.papers.alc_printed import TABLE_1
from simulations.papers.alc_study import (
    ATTACKER,
    SAID,
    CheckpointStudy,
    batch_mean,
    chosen,
    image_values,
)
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.intervals import mean_interval
from simulations.papers.lab import Lab
from simulations.papers.lavp_study import sharing
from simulations.papers.rank_correlation import judge_positive

OUTCOMES = ("mse_normalised", "psnr", "lpips")


@dataclass(frozen=True)
class LeakageOverTraining(CheckpointStudy):
    """Angular Lipschitz study, Table 1: reconstruction over training epochs in both modes.

    One network is attacked at several checkpoints, by a client in eval mode and in train mode of
    BatchNorm, with the same weights. The paper finds that early checkpoints leak and late ones do
    not, and that train mode leaks more once training has begun.

    Attributes:
        early: the epochs after the first that the paper's 5 and 10 stand for.
    """

    early: Sequence[int] = ()

    def run(self, lab: Lab) -> Findings:
        """Mean and deviation of each cell, and the paper's orderings."""
        rows = self.measure(lab)
        name = next(iter(self.networks))
        epochs = sorted({int(row["epoch"] or 0) for row in rows})
        table: list[Row] = []
        for mode in ("eval", "train"):
            for epoch in epochs:
                cell = chosen(rows, mode=mode, epoch=epoch)
                line: Row = {"mode": mode, "epoch": epoch, "accuracy": cell[0]["accuracy"]}
                printed = TABLE_1[mode].get(epoch, (None,) * 3)
                for outcome, paper in zip(OUTCOMES, printed, strict=True):
                    values = image_values(cell, outcome)
                    line[outcome] = _spread(values)
                    line[f"{outcome}, paper's epoch {epoch}"] = paper
                    line["n"] = max(len(values), int(line.get("n") or 0))
                table.append({k: v for k, v in line.items() if v is not None})
        return Findings(
            [_merged(line) for line in table],
            tuple(self._claims(rows, epochs)),
            {"training": over_training(rows, [name])},
            ATTACKER,
            (*SAID, f"Network: {name}. Intervals are of the mean over batches."),
        )

    def _claims(self, rows: list[Row], epochs: list[int]) -> list[Claim]:
        last, early = epochs[-1], list(self.early)

        def mse(mode: str, epoch: int) -> NDArray:
            return np.array(
                [batch_mean(row, "mse_normalised") for row in chosen(rows, mode=mode, epoch=epoch)]
            )

        def of_early(mode: str) -> NDArray:
            return np.mean([mse(mode, epoch) for epoch in early], axis=0)

        pairs: list[tuple[str, str, NDArray]] = [
            (
                "In train mode, early checkpoints leak more than the last one: lower MSE.",
                "0.69 (e = 5) against 1.84 (e = 300)",
                mse("train", last) - of_early("train"),
            ),
            (
                "In train mode, the untrained network leaks less than early checkpoints.",
                "1.90 (e = 0) against 0.69 (e = 5)",
                mse("train", 0) - of_early("train"),
            ),
            (
                "In eval mode, the untrained network leaks most: lower MSE than early checkpoints.",
                "0.85 (e = 0) against 1.50 (e = 5)",
                of_early("eval") - mse("eval", 0),
            ),
            (
                "Early checkpoints leak more in train mode than in eval mode.",
                "0.69 against 1.50 (e = 5)",
                of_early("eval") - of_early("train"),
            ),
        ]
        return [
            _judge_mean(f"{text} Table 1.", paper, differences, self.seed)
            for text, paper, differences in pairs
        ]


@dataclass(frozen=True)
class WidthAndSkips(CheckpointStudy):
    """Angular Lipschitz study, Figures 3 and 4: width, and networks without skip connections.

    The least LPIPS over the checkpoints, for each network and BatchNorm mode. The paper's network
    without skip connections is a ConvNet; here the same ResNet without its skips stands beside it.

    Attributes:
        wide: names of a narrow and a wide network that are compared.
        skips: names of a network with skip connections and of one without.
        parts_of: the experiment whose finished parts are read.
    """

    wide: Sequence[str] = ("", "")
    skips: Sequence[str] = ("", "")
    parts_of: str = "alc_correlation"

    def run(self, lab: Lab) -> Findings:
        """The best checkpoint of each network and mode, and the paper's orderings."""
        lab = sharing(lab, self.parts_of)
        rows = self.measure(lab)
        outcome = "lpips" if lab.lpips else "mse_normalised"
        best = {
            (name, mode): self._best(chosen(rows, network=name, mode=mode), outcome)
            for name in self.networks
            for mode in ("eval", "train")
        }
        table: list[Row] = [
            {
                "network": name,
                "mode": mode,
                "best epoch": epoch,
                outcome: _spread(values),
                "n batches": len(values),
                "paper": "plot only",
            }
            for (name, mode), (epoch, values) in best.items()
        ]
        claims = []
        for text, (left, left_mode), (right, right_mode) in self._orderings():
            difference = best[left, left_mode][1] - best[right, right_mode][1]
            claims.append(_judge_mean(text, "plot only", difference, self.seed))
        figure = over_training(rows, list(self.networks), outcome)
        remark = "The best epoch is chosen by the mean over batches, as in the paper."
        return Findings(table, tuple(claims), {"widths": figure}, ATTACKER, (*SAID, remark))

    def _orderings(self) -> list[tuple[str, tuple[str, str], tuple[str, str]]]:
        """Claims that the left side has the larger distance from the truth than the right."""
        narrow, wide = self.wide
        with_skips, without = self.skips
        return [
            ("A wider network leaks more in eval mode (Fig. 4).", (narrow, "eval"), (wide, "eval")),
            (
                "A wider network leaks less in train mode (Fig. 4).",
                (wide, "train"),
                (narrow, "train"),
            ),
            (
                "Train mode leaks more than eval mode at the best checkpoint (Fig. 4).",
                (with_skips, "eval"),
                (with_skips, "train"),
            ),
            (
                "Without skip connections a network leaks less in train mode (Fig. 3, ConvNet).",
                (without, "train"),
                (with_skips, "train"),
            ),
            (
                "Without skip connections a network leaks less in eval mode (Fig. 3, ConvNet).",
                (without, "eval"),
                (with_skips, "eval"),
            ),
        ]

    @staticmethod
    def _best(rows: list[Row], outcome: str) -> tuple[int, NDArray]:
        """The epoch of least mean, and its batches' values."""
        by_epoch = {
            int(row["epoch"] or 0): np.array(
                [batch_mean(other, outcome) for other in rows if other["epoch"] == row["epoch"]]
            )
            for row in rows
        }
        epoch = min(by_epoch, key=lambda e: float(by_epoch[e].mean()))
        return epoch, by_epoch[epoch]


def _judge_mean(text: str, paper: str, values: NDArray, seed: int) -> Claim:
    """Whether a mean over batches is positive."""
    return judge_positive(text, paper, *mean_interval(values.tolist(), seed), len(values))


def _spread(values: NDArray) -> str | None:
    if not len(values):
        return None
    return f"{values.mean():.4f} ± {values.std():.4f}"


def _merged(line: Row) -> Row:
    """Put the paper's cells of any epoch under one name each."""
    found: Row = {}
    for key, value in line.items():
        name, _, epoch = key.partition(", paper's epoch ")
        found[f"{name}, paper at the same epoch" if epoch else key] = value
    return found
