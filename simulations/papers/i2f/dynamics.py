"""Figure 18 of I²F: I_lb and the error of attacks while a network learns."""

from dataclasses import dataclass

import numpy as np

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import (
    Table,
    bootstrap,
    judged,
    spearman,
    table_of,
    without_resnet18,
)
from simulations.papers.i2f.trained import FairnessPanel, TrainedStudy
from simulations.papers.lab import Lab


@dataclass(frozen=True)
class Dynamics(TrainedStudy):
    """I_lb and RMSE over the epochs of training (Zhang et al. 2023, appendix F, figure 18).

    Gaussian noise of variance 1e-3; the same images at every epoch. The paper shows epochs 0 to 80
    of LeNet on MNIST and of ResNet-18 on CIFAR-10.
    """

    def run(self, lab: Lab) -> Findings:
        """Train, attack, compare, judge."""
        tables = {str(panel): self._table(lab, panel) for panel in self.panels}
        return Findings(
            [row for name, table in tables.items() for row in _rows(name, table)],
            (
                *(claim for name, table in tables.items() for claim in _claims(name, table)),
                *self._missing(),
            ),
            {"dynamics": charts.lines({n: _drawn(t) for n, t in tables.items()}, "epoch")},
            ATTACKER,
            (
                "Iterations: " + ", ".join(f"{p}: {p.iterations}" for p in self.panels) + ".",
                "I_lb is divided by √N here, as the RMSE is; units of normalised inputs.",
            ),
        )

    def _table(self, lab: Lab, panel: FairnessPanel) -> Table:
        table = dict(table_of(self.rows(lab, panel)))
        table["i_lb_rmse"] = table["i_lb"] / table["root"]
        return table

    def _missing(self) -> list[Claim]:
        text = "ResNet-18, CIFAR-10: I_lb and the RMSE rise with training (Fig. 18)"
        why = "ResNet-18 is trained and attacked at size=paper only"
        return without_resnet18(self.panels, text, why)


def _claims(panel: str, table: Table) -> list[Claim]:
    return [
        judged(
            f"{panel}: I_lb rises with training (Fig. 18): Spearman's ρ with the epoch",
            "plot only",
            bootstrap(table, lambda t: spearman(t, "epoch", "i_lb")),
            least=0.0,
        ),
        judged(
            f"{panel}: the RMSE rises with training (Fig. 18): Spearman's ρ with the epoch",
            "plot only",
            bootstrap(table, lambda t: spearman(t, "epoch", "rmse")),
            least=0.0,
        ),
        judged(
            f"{panel}: the last epoch's RMSE over that of epoch {int(table['epoch'].min())} "
            "(Fig. 18: a significant rise)",
            "plot only",
            bootstrap(table, _rise),
            least=1.0,
        ),
        judged(
            f"{panel}: at almost all epochs some image has a low I_lb (appendix F): share of "
            "epochs and seeds whose least I_lb is below half of the mean",
            "plot only",
            bootstrap(table, _low_ones),
            least=0.75,
        ),
        judged(
            f"{panel}: the RMSE follows I_lb over images and epochs: Spearman's ρ",
            "not printed",
            bootstrap(table, lambda t: spearman(t, "i_lb", "rmse")),
            least=0.5,
        ),
    ]


def _rise(table: Table) -> float:
    first, last = table["epoch"].min(), table["epoch"].max()
    means = [table["rmse"][table["epoch"] == epoch].mean() for epoch in (last, first)]
    return float(means[0] / means[1])


def _low_ones(table: Table) -> float:
    found = []
    for seed in np.unique(table["seed"]):
        for epoch in np.unique(table["epoch"]):
            values = table["i_lb"][(table["seed"] == seed) & (table["epoch"] == epoch)]
            found.append(values.min() < 0.5 * values.mean())
    return float(np.mean(found))


def _drawn(table: Table) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    epochs = np.unique(table["epoch"])
    return {
        label: (epochs, np.array([table[name][table["epoch"] == e].mean() for e in epochs]))
        for label, name in (("RMSE", "rmse"), ("I_lb/√N", "i_lb_rmse"))
    }


def _rows(panel: str, table: Table) -> list[Row]:
    rows: list[Row] = []
    for epoch in np.unique(table["epoch"]):
        chosen = {name: column[table["epoch"] == epoch] for name, column in table.items()}
        spread = bootstrap(chosen, lambda t: float(t["rmse"].mean()))
        rows.append(
            {
                "panel": panel,
                "epoch": int(epoch),
                "accuracy": float(chosen["accuracy"].mean()),
                "n": len(chosen["rmse"]),
                "mean RMSE": spread.value,
                "low": spread.low,
                "high": spread.high,
                "median I_lb": float(np.median(chosen["i_lb"])),
                "least I_lb": float(chosen["i_lb"].min()),
                "median λmax": float(np.median(chosen["lambda_max"])),
                "paper": "plot only",
            }
        )
    return rows
