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
        ours: a preset of this project that is asked where neither of two compared attacks of the
            paper does better than a grey image; empty for none.
    """

    data: Sequence[str]
    attacks: Sequence[str]
    iterations: Mapping[str, int]
    noise: Noise
    schemes: Sequence[Scheme] = ("uniform", *NORMAL, "kaiming", "xavier")
    network: str = "LeNet"
    options: Mapping[str, int] = field(default_factory=dict)
    ours: str = ""

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        tables: dict[str, Table] = {}
        for data in self.data:
            for attack in self.attacks:
                tables[f"{self.network} {data} {attack}"] = self._table(lab, data, attack)
        claims: list[Claim] = []
        for name in list(tables):
            data = name.split()[1]
            judged_by = f"{self.network} {data} {self.ours}"
            if self.ours and any(_at_grey(tables[name], *pair) for pair in self._pairs()):
                tables.setdefault(judged_by, self._table(lab, data, self.ours))
            claims += self._claims(name, tables[name], tables.get(judged_by))
        drawn: dict[str, dict[str, NDArray]] = {
            name: {str(s): t["mse"][t["scheme"] == s] for s in self.schemes}
            for name, t in tables.items()
        }
        return Findings(
            [_row(name, scheme, t) for name, t in tables.items() for scheme in self.schemes],
            tuple(claims),
            {"mse": charts.boxes(drawn, "MSE")},
            ATTACKER,
            (
                f"Iterations: {dict(self.iterations)} (the authors' code takes 24,000).",
                "All is in units of normalised inputs, where a grey image has an MSE of about 1.",
            ),
        )

    def _table(self, lab: Lab, data: str, attack: str) -> Table:
        rows: list[Row] = []
        for scheme in self.schemes:
            victim = Victim(self.network, data, scheme, self.options)
            panel = Panel(victim, attack, self.iterations[data])
            rows += [{**row, "scheme": scheme} for row in noise_rows(lab, panel, self.noise)]
        table = dict(table_of(rows))
        table["mse"] = table["rmse"] ** 2
        return table

    def _pairs(self) -> list[tuple[str, str]]:
        """The schemes of each claim: the one of the larger error, and the one of the smaller."""
        return [
            pair
            for normal in NORMAL
            if normal in self.schemes
            for pair in ((normal, "uniform"), ("kaiming", normal), ("xavier", normal))
        ]

    def _claims(self, name: str, table: Table, ours: Table | None) -> list[Claim]:
        claims = []
        for over, under in self._pairs():
            far = under == "uniform"
            text = "uniform leaks far more than normal" if far else f"normal leaks more than {over}"
            said = f"{text} (Fig. 8); {name}: MSE of {over} over {under}"
            claims.append(self._claim(said, table, ours, over, under, 2.0 if far else 1.0))
        return claims

    def _claim(
        self, said: str, table: Table, ours: Table | None, over: str, under: str, least: float
    ) -> Claim:
        """The ratio of two schemes' errors, where at least one of the attacks got anywhere."""
        ratio = partial(_ratio, over=over, under=under)
        if not _at_grey(table, over, under):
            return judged(said, "plot only", bootstrap(table, ratio), least=least)
        why = "neither attack does better than a grey image"
        if ours is not None and not _at_grey(ours, over, under):
            why = f"{why}: judged by {self.ours}"
            return judged(said, "plot only", bootstrap(ours, ratio), least=least, reason=why)
        found = bootstrap(table, ratio)
        asked = f", nor does {self.ours}" if ours is not None else ""
        more = "more iterations" if asked else "more iterations, or size=thorough"
        numbers = found.value, found.low, found.high, found.n
        why = f"{why}{asked}; it would take {more}"
        return Claim(said, "plot only", *numbers, Judgement.NOT_COMPARABLE, why)


def _at_grey(table: Table, over: str, under: str) -> bool:
    """Whether neither scheme's attacks do better than a grey image, by the mean's interval."""
    for scheme in (over, under):
        chosen = {name: column[table["scheme"] == scheme] for name, column in table.items()}
        if bootstrap(chosen, lambda t: float(np.mean(t["mse"]))).high < GREY:
            return False
    return True


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
