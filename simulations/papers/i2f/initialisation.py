"""Figure 8 of I²F: how the weights are drawn decides how much leaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flwr_leakage.models.initialization import Scheme
from simulations.papers.findings import Claim, Findings, Judgement, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import Table, bootstrap, judged, table_of
from simulations.papers.i2f.noise import Noise, Panel, noise_rows
from simulations.papers.i2f.victim import Victim
from simulations.papers.lab import Lab

NORMAL: tuple[Scheme, ...] = ("normal", "normal_variance")
GREY = 1.0
"""MSE of a grey image in units of normalised inputs, about."""


@dataclass(frozen=True)
class Initialisation:
    """Initial weights and the error of attacks (Zhang et al. 2023, section 5.3, figure 8).

    ``uniform``: U(−0.5, 0.5). ``normal``: standard deviation 0.5, as in the authors' code;
    ``normal_variance``: variance 0.5, as in the paper's text. ``kaiming``: N(0, 2/fan_in),
    ``xavier``: Glorot's uniform, biases 0; the authors' code draws these two and their biases
    otherwise (uniform with a gain of 1; U(−0.5, 0.5)). The size of the noise is not in the text;
    the code's default is a standard deviation of 1e-3 in this experiment.

    Attributes:
        data: names of data sets.
        attacks: ``DGL``, ``GS``.
        iterations: of the attacks, by data set.
        noise: its one variance is that of all attacks.
        schemes: ways to draw the weights.
        network: the class of the network.
        options: its arguments.
    """

    data: Sequence[str]
    attacks: Sequence[str]
    iterations: Mapping[str, int]
    noise: Noise
    schemes: Sequence[Scheme] = ("uniform", *NORMAL, "kaiming", "xavier")
    network: str = "LeNet"
    options: Mapping[str, int] = field(default_factory=dict)

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        tables: dict[str, Table] = {}
        for data in self.data:
            for attack in self.attacks:
                rows = [row for s in self.schemes for row in self._rows(lab, data, attack, s)]
                table = dict(table_of(rows))
                table["mse"] = table["rmse"] ** 2
                tables[f"{self.network} {data} {attack}"] = table
        drawn: dict[str, dict[str, NDArray]] = {
            name: {str(s): t["mse"][t["scheme"] == s] for s in self.schemes}
            for name, t in tables.items()
        }
        return Findings(
            [_row(name, scheme, t) for name, t in tables.items() for scheme in self.schemes],
            tuple(claim for name, table in tables.items() for claim in self._claims(name, table)),
            {"mse": charts.boxes(drawn, "MSE")},
            ATTACKER,
            (
                f"Iterations: {dict(self.iterations)} (the authors' code takes 24,000).",
                "All is in units of normalised inputs, where a grey image has an MSE of about 1.",
            ),
        )

    def _rows(self, lab: Lab, data: str, attack: str, scheme: Scheme) -> list[Row]:
        victim = Victim(self.network, data, scheme, self.options)
        panel = Panel(victim, attack, self.iterations[data])
        return [{**row, "scheme": scheme} for row in noise_rows(lab, panel, self.noise)]

    def _claims(self, name: str, table: Table) -> list[Claim]:
        claims = []
        for normal in NORMAL:
            if normal in self.schemes:
                claims.append(_claim(name, table, "uniform leaks far more than normal", normal,
                                     "uniform", 2.0))  # fmt: skip
                claims += [
                    _claim(name, table, f"normal leaks more than {scheme}", scheme, normal, 1.0)
                    for scheme in ("kaiming", "xavier")
                ]
        return claims


def _claim(name: str, table: Table, text: str, over: str, under: str, least: float) -> Claim:
    """The ratio of two schemes' errors, where at least one of the attacks got anywhere."""
    said = f"{text} (Fig. 8); {name}: MSE of {over} over {under}"
    found = bootstrap(table, partial(_ratio, over=over, under=under))
    if min(_mean(table, over), _mean(table, under)) < GREY:
        return judged(said, "plot only", found, least=least)
    why = "neither attack does better than a grey image: they have not converged"
    numbers = found.value, found.low, found.high, found.n
    return Claim(said, "plot only", *numbers, Judgement.NOT_COMPARABLE, why)


def _ratio(table: Table, over: str, under: str) -> float:
    """Mean MSE of one scheme over that of another."""
    return _mean(table, over) / _mean(table, under)


def _mean(table: Table, scheme: str) -> float:
    return float(np.mean(table["mse"][table["scheme"] == scheme]))


def _row(panel: str, scheme: str, table: Table) -> Row:
    chosen = {name: column[table["scheme"] == scheme] for name, column in table.items()}
    spread = bootstrap(chosen, lambda t: float(np.mean(t["mse"])))
    return {
        "panel": panel,
        "initialisation": scheme,
        "n": len(chosen["mse"]),
        "mean MSE": spread.value,
        "low": spread.low,
        "high": spread.high,
        "least MSE": float(chosen["mse"].min()),
        "largest MSE": float(chosen["mse"].max()),
        "median λmax": float(np.median(chosen["lambda_max"])),
        "median I_lb": float(np.median(chosen["i_lb"])),
        "median objective": float(np.median(chosen["objective"])),
        "paper": "plot only",
    }
