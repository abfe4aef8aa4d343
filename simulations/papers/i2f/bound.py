"""Figures 1 and 2 of I²F: is I_lb close to I²F, and below the error of attacks?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import (
    Table,
    bootstrap,
    judged,
    median_ratio,
    share,
    slope,
    spearman,
    table_of,
    without_resnet18,
)
from simulations.papers.i2f.noise import Noise, Panel, noise_rows
from simulations.papers.lab import Lab

NEAR = 3.0
"""The factor within which two numbers count as close on the paper's logarithmic plots."""


@dataclass(frozen=True)
class Bound:
    """I_lb against I²F and against the error of attacks (Zhang et al. 2023, figures 1 and 2).

    Gaussian noise of several variances is added to the gradient of one image. I²F's theory is of
    the norm ‖x̂ − x‖ = √N·RMSE; the authors' code compares the norm I_lb with the RMSE, which lies
    √N = 28 to 55 times lower. Both comparisons are given. Their log of five digits (LeNet, MNIST,
    GS, variance 1e-5, ε = 1) is the only place with numbers.

    Attributes:
        panels: networks, data and attacks; the first one is figure 1.
        noise: of all panels.
    """

    panels: Sequence[Panel]
    noise: Noise

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        rows = [row for panel in self.panels for row in noise_rows(lab, panel, self.noise)]
        names = [str(panel) for panel in self.panels]
        tables = {name: table_of(rows, panel=name) for name in names}
        iterations = ", ".join(f"{p}: {p.iterations}" for p in self.panels)
        return Findings(
            [
                self._row(name, variance, rows)
                for name in names
                for variance in self.noise.variances
            ],
            (
                *_figure_1(tables[names[0]]),
                *(claim for name in names for claim in _figure_2(name, tables[name])),
                *_comparisons(rows, names),
                *self._missing(),
            ),
            {"rmse": charts.against_equality(tables, "i_lb", "rmse", "I_lb", "RMSE")},
            ATTACKER,
            (
                f"Iterations: {iterations} (the authors' code takes 24,000).",
                "An attack that has not converged adds an error of its own to every image: where "
                "the RMSE hardly depends on the noise, iterations set it and not I²F.",
                "All is in units of normalised inputs. Intervals are of images drawn with "
                "replacement, each with all of its seeds and variances.",
                "The paper's other figures of this kind are of ResNet-18 and ResNet-152.",
            ),
        )

    def _row(self, panel: str, variance: float, rows: list[Row]) -> Row:
        table = table_of(rows, panel=panel, variance=variance)
        logged = "I_lb 0.0077, I 0.0178, RMSE 0.0295 (log)"
        compared = panel == "LeNet mnist GS" and variance == 1e-5
        cells: Row = {"panel": panel, "variance": variance, "n": len(table["rmse"])}
        for label, column in (
            ("I_nom", "i_nom"),
            ("I_lb", "i_lb"),
            ("I, ε = 1", "i_1"),
            ("I undamped", "i_undamped"),
            ("RMSE", "rmse"),
        ):
            values = table.get(column, np.array([np.nan]))
            known = values[np.isfinite(values)]
            cells[f"median {label}"] = float(np.median(known)) if len(known) else None
        cells["‖x̂ − x‖ ≥ I_lb"] = float(np.mean(_norm(table) >= table["i_lb"]))
        cells["RMSE ≥ I_lb"] = float(np.mean(table["rmse"] >= table["i_lb"]))
        cells["paper"] = logged if compared else "plot only"
        return cells

    def _missing(self) -> list[Claim]:
        text = "ResNet-18: I_lb approximates or bounds the RMSE on MNIST and CIFAR-10 (Fig. 1, 2)"
        why = "ResNet-18 is attacked at size=paper only; the claims above are of other networks"
        return without_resnet18(self.panels, text, why)


def _norm(table: Table) -> np.ndarray:
    return table["rmse"] * table["root"]


def _figure_1(table: Table) -> list[Claim]:
    """The first panel's claims about I, I_lb and I_nom."""
    found = [
        judged(
            "I_lb is a tight approximation of I (Fig. 1a): I/I_lb, I with ε = 1",
            "plot only; log: 1.7 to 2.9",
            bootstrap(table, lambda t: median_ratio(t, "i_1", "i_lb")),
            1 / NEAR,
            NEAR,
        ),
        judged(
            "I_nom is far below I and overestimates the risk (Fig. 1a): I/I_nom, I with ε = 1",
            "plot only; log: 0.69 to 0.77",
            bootstrap(table, lambda t: median_ratio(t, "i_1", "i_nom")),
            least=NEAR,
            reason="I_nom = λmax I_lb: it lies below where λmax < 1 only",
        ),
    ]
    if "i_undamped" in table:
        found += [
            judged(
                "I_lb is a tight approximation of I (eq. 4, 5) without damping: I/I_lb",
                "plot only",
                bootstrap(table, lambda t: median_ratio(t, "i_undamped", "i_lb")),
                1 / NEAR,
                NEAR,
                reason="ε = 1e-6 λmax",
            ),
            judged(
                "I without damping is the error (eq. 4): ‖x̂ − x‖/I",
                "not shown",
                bootstrap(table, lambda t: float(np.nanmedian(_norm(t) / t["i_undamped"]))),
                1 / NEAR,
                NEAR,
                reason="ε = 1e-6 λmax",
            ),
        ]
    return found


def _figure_2(panel: str, table: Table) -> list[Claim]:
    """One panel's claims about I_lb and the attack's error."""
    above = share(table, lambda t: _norm(t) >= t["i_lb"])
    literal = share(table, lambda t: t["rmse"] >= t["i_lb"])
    ratio = bootstrap(table, lambda t: median_ratio(t, "rmse", "i_lb"))
    return [
        judged(
            f"{panel}: I_lb bounds ‖x̂ − x‖ from below (eq. 5): share of attacks",
            "plot only",
            above,
            least=0.95,
        ),
        judged(
            f"{panel}: RMSE lies on or above I_lb as plotted (Fig. 2): share of attacks",
            "plot only; log: 5 of 5",
            literal,
            least=0.95,
            reason="a norm against a root mean square",
        ),
        judged(
            f"{panel}: I_lb approximates the RMSE as plotted (Fig. 1b, 2): RMSE/I_lb",
            "plot only; log: 3.0 to 4.5",
            ratio,
            1 / NEAR,
            2 * NEAR,
        ),
        judged(
            f"{panel}: RMSE rises along the equal line (Fig. 2): slope of log RMSE over log I_lb",
            "plot only (1 is the equal line)",
            bootstrap(table, lambda t: slope(t, "i_lb", "rmse")),
            0.8,
            1.25,
        ),
        judged(
            f"{panel}: I_lb ranks attacks over all noise levels: Spearman's ρ with the RMSE",
            "not printed",
            bootstrap(table, lambda t: spearman(t, "i_lb", "rmse")),
            least=0.5,
        ),
        judged(
            f"{panel}: I_lb ranks the images within one noise level: mean Spearman's ρ",
            "not printed",
            bootstrap(table, within_level),
            least=0.5,
            reason="the paper shows all levels together, where the noise itself does the ranking",
        ),
    ]


def within_level(table: Table) -> float:
    """Spearman's ρ of I_lb and RMSE, mean over seeds and variances."""
    found = []
    for seed in np.unique(table["seed"]):
        for variance in np.unique(table["variance"]):
            chosen = (table["seed"] == seed) & (table["variance"] == variance)
            found.append(spearman({k: v[chosen] for k, v in table.items()}, "i_lb", "rmse"))
    return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")


def _comparisons(rows: list[Row], names: list[str]) -> list[Claim]:
    """Claims that compare two panels, on the same images."""
    claims = []
    for text, over, under, least, most in (
        ("attacks do not differ significantly (Fig. 2a, b): RMSE", "GS", "DGL", 0.5, 2.0),
        ("CIFAR-10 has the higher RMSE (Fig. 2b, c): RMSE", "cifar10", "mnist", 1.0, np.inf),
    ):
        for name in names:
            other = name.replace(over, under)
            if over in name and other != name and other in names:
                both = table_of([r for r in rows if r["panel"] in (name, other)])
                found = bootstrap(both, partial(_median_ratio_of, over=name, under=other))
                title = f"{text} of {name} over {other}"
                claims.append(judged(title, "plot only", found, least, most))
    linear = [name for name in names if name.startswith("Linear")]
    deep = [name for name in names if "cifar10" in name and name not in linear]
    for name in deep if linear else []:
        both = table_of([r for r in rows if r["panel"] in (name, linear[0])])

        def gain(table: Table, a: str = linear[0], b: str = name) -> float:
            parts = [{k: v[table["panel"] == p] for k, v in table.items()} for p in (a, b)]
            return within_level(parts[0]) - within_level(parts[1])

        claims.append(
            judged(
                f"the linear model correlates better (Fig. 2c, d) than {name}: ρ within a level, "
                "difference",
                "plot only",
                bootstrap(both, gain),
                least=0.0,
            )
        )
    return claims


def _median_ratio_of(table: Table, over: str, under: str) -> float:
    medians = [np.median(table["rmse"][table["panel"] == name]) for name in (over, under)]
    return float(medians[0] / medians[1])
