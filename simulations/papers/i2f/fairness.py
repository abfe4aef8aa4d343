"""Figures 7, 14 and 15 of I²F: the same noise protects some images and classes, and not others."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import (
    Table,
    bootstrap,
    judged,
    share,
    table_of,
    without_resnet18,
)
from simulations.papers.i2f.trained import FairnessPanel, TrainedStudy
from simulations.papers.lab import Lab

PRINTED = {"mnist": ((5, 8), (7, 9)), "digits": ((5, 8), (7, 9)), "cifar10": ((7, 8), ())}
"""Classes that the captions of figures 14 and 15 call vulnerable, and well protected."""


@dataclass(frozen=True)
class Fairness(TrainedStudy):
    """Unequal protection by equal noise (Zhang et al. 2023, section 5.2, figures 7, 14, 15).

    Gaussian noise of variance 1e-3 on the gradients of a trained network. The paper's CIFAR-10
    network is a ResNet-18.
    """

    def run(self, lab: Lab) -> Findings:
        """Train, attack, compare, judge."""
        tables = {str(panel): self._table(lab, panel) for panel in self.panels}
        accuracy = ", ".join(
            f"{name} {np.mean(table['accuracy']):.0%}" for name, table in tables.items()
        )
        by_class = {
            name: {f"{k:.0f}": t["mse"][t["label"] == k] for k in np.unique(t["label"])}
            for name, t in tables.items()
        }
        return Findings(
            [row for name, table in tables.items() for row in _rows(name, table)],
            (
                *(
                    claim
                    for panel in self.panels
                    for claim in _claims(str(panel), panel.victim.data, tables[str(panel)])
                ),
                *self._missing(),
            ),
            {"mse_by_class": charts.boxes(by_class, "MSE")},
            ATTACKER,
            (
                f"Test accuracy of the networks, mean over seeds: {accuracy}.",
                "Iterations: " + ", ".join(f"{p}: {p.iterations}" for p in self.panels) + ".",
                "An attack that has not converged adds an error of its own to every image: where "
                "the RMSE is near 1, that of a grey image, iterations set it and not I²F.",
                "MSE is in units of normalised inputs. Intervals are of images drawn with "
                "replacement, each with all of its seeds.",
            ),
        )

    def _table(self, lab: Lab, panel: FairnessPanel) -> Table:
        table = dict(table_of(self.rows(lab, panel, [max(panel.victim.epochs)])))
        table["mse"] = table["rmse"] ** 2
        return table

    def _missing(self) -> list[Claim]:
        text = "ResNet-18, CIFAR-10, GS: classes 7 and 8 are more vulnerable (Fig. 15)"
        why = "a trained ResNet-18 is attacked at size=paper only"
        return without_resnet18(self.panels, text, why)


def _claims(panel: str, data: str, table: Table) -> list[Claim]:
    claims = [
        judged(
            f"{panel}: a large spread over images (Fig. 7, 15): last over first decile of the "
            "images' MSE",
            "plot only",
            bootstrap(table, _spread),
            least=2.0,
        ),
        judged(
            f"{panel}: many images are more vulnerable than the average tells (section 5.2): share "
            "below half of the mean MSE",
            "plot only",
            share(table, lambda t: t["mse"] < 0.5 * t["mse"].mean()),
            least=0.1,
        ),
        judged(
            f"{panel}: some classes are far more secure than others (Fig. 7): largest over least "
            "class mean",
            "plot only",
            bootstrap(table, _class_spread),
            least=2.0,
            reason=f"Kruskal–Wallis over images p = {_kruskal(table):.2g}",
        ),
        judged(
            f"{panel}: I_lb tells which images: Spearman's ρ with the MSE within a seed, mean",
            "not printed",
            bootstrap(table, _rank_within_seed),
            least=0.5,
        ),
    ]
    weak, strong = PRINTED.get(data, ((), ()))
    for classes, side in ((weak, "below"), (strong, "above")):
        if classes:
            ratio = bootstrap(table, partial(_class_ratio, classes=classes))
            claims.append(
                judged(
                    f"{panel}: classes {' and '.join(map(str, classes))} lie {side} the mean (Fig. "
                    "14, 15): their MSE over that of all",
                    "plot only",
                    ratio,
                    *((-np.inf, 1.0) if side == "below" else (1.0, np.inf)),
                )
            )
    return claims


def _image_means(table: Table) -> np.ndarray:
    return np.array([table["mse"][table["image"] == i].mean() for i in np.unique(table["image"])])


def _spread(table: Table) -> float:
    """Of deciles: draws with replacement never lie beyond the largest and the least image."""
    means = _image_means(table)
    return float(np.quantile(means, 0.9) / np.quantile(means, 0.1))


def _class_spread(table: Table) -> float:
    means = [table["mse"][table["label"] == k].mean() for k in np.unique(table["label"])]
    return float(max(means) / min(means))


def _class_ratio(table: Table, classes: tuple[int, ...]) -> float:
    chosen = np.isin(table["label"], classes)
    return float(table["mse"][chosen].mean() / table["mse"].mean()) if chosen.any() else np.nan


def _kruskal(table: Table) -> float:
    """P of equal classes; an image's mean over the seeds is one value."""
    images = np.unique(table["image"])
    labels = np.array([table["label"][table["image"] == i][0] for i in images])
    means = _image_means(table)
    groups = [means[labels == label] for label in np.unique(labels)]
    return float(stats.kruskal(*groups).pvalue) if len(groups) > 1 else float("nan")


def _rank_within_seed(table: Table) -> float:
    found = []
    for seed in np.unique(table["seed"]):
        chosen = table["seed"] == seed
        found.append(stats.spearmanr(table["i_lb"][chosen], table["mse"][chosen]).statistic)
    return float(np.nanmean(found))


def _rows(panel: str, table: Table) -> list[Row]:
    rows: list[Row] = []
    for label in np.unique(table["label"]):
        chosen = table["label"] == label
        mse = table["mse"][chosen]
        rows.append(
            {
                "panel": panel,
                "class": int(label),
                "n": len(mse),
                "mean MSE": float(mse.mean()),
                "least MSE": float(mse.min()),
                "largest MSE": float(mse.max()),
                "median I_lb": float(np.median(table["i_lb"][chosen])),
                "mean SSIM": float(table["ssim"][chosen].mean()),
                "paper": "plot only",
            }
        )
    return rows
