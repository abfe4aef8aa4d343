"""Figure 19 of I²F: which absolute ε makes I²F tell the error of attacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import Table, bootstrap, judged, share, spearman, table_of
from simulations.papers.i2f.noise import Noise, Panel, noise_rows
from simulations.papers.lab import Lab


@dataclass(frozen=True)
class Damping:
    """‖(JJᵀ + εI)⁻¹Jδ‖ for absolute ε (Zhang et al. 2023, section 4, appendix G, figure 19).

    The paper finds ε from 1 to 10 effective and 0.1 not: there I²F exceeds the RMSE. Its numbers
    are norms beside root mean squares; here I/√N stands beside them too. The attacks are those of
    figure 1; the undamped I²F has ε = 1e-6 λmax.

    Attributes:
        panels: networks, data and attacks.
        noise: of all panels, with the ε.
    """

    panels: Sequence[Panel]
    noise: Noise

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        dampings = [damping for damping in self.noise.dampings if damping > 0]
        names = [f"i_{damping:g}" for damping in dampings]
        tables = {str(p): table_of(noise_rows(lab, p, self.noise)) for p in self.panels}
        shown = {
            f"{panel}, {name.replace('i_', 'ε = ')}": {**table, "shown": table[name]}
            for panel, table in tables.items()
            for name in [*names, "i_undamped"]
            if name in table
        }
        return Findings(
            [
                _row(panel, name, table)
                for panel, table in tables.items()
                for name in [*names, "i_undamped"]
                if name in table
            ],
            tuple(claim for panel, t in tables.items() for claim in _claims(panel, t, dampings)),
            {"damping": charts.against_equality(shown, "shown", "rmse", "I", "RMSE")},
            ATTACKER,
            (
                "Iterations: " + ", ".join(f"{p}: {p.iterations}" for p in self.panels) + ".",
                "r² is of a straight line through I and RMSE, by which the paper chooses ε.",
            ),
        )


def _claims(panel: str, table: Table, dampings: Sequence[float]) -> list[Claim]:
    claims = []
    for damping in dampings:
        name = f"i_{damping:g}"
        least = share(table, partial(_above, name=name))
        if damping >= 1:
            text = "is effective (Fig. 19): share of attacks with RMSE ≥ I as plotted"
            claims.append(judged(f"{panel}: ε = {damping:g} {text}", "plot only", least, 0.95))
        else:
            text = "is not effective (Fig. 19): share of attacks with RMSE ≥ I as plotted"
            found = judged(f"{panel}: ε = {damping:g} {text}", "plot only", least, most=0.5)
            claims.append(found)
        fit = bootstrap(table, partial(_r_squared, name=name))
        text = f"{panel}: I with ε = {damping:g} is linear in the RMSE (section 4): r²"
        claims.append(judged(text, "plot only", fit, least=0.5))
    if "i_undamped" in table:
        text = f"{panel}: the undamped I²F is the error (eq. 4): RMSE/(I/√N)"
        scale = bootstrap(table, partial(_scale, name="i_undamped"))
        claims.append(judged(text, "not shown", scale, 1 / 3, 3))
    return claims


def _above(table: Table, name: str) -> np.ndarray:
    return table["rmse"] >= table[name]


def _known(table: Table, name: str) -> np.ndarray:
    return np.isfinite(table[name]) & np.isfinite(table["rmse"])


def _r_squared(table: Table, name: str) -> float:
    known = _known(table, name)
    if known.sum() < 3:
        return float("nan")
    return float(np.corrcoef(table[name][known], table["rmse"][known])[0, 1] ** 2)


def _scale(table: Table, name: str) -> float:
    if not _known(table, name).any():
        return float("nan")
    known = _known(table, name)
    return float(np.median((table["rmse"] * table["root"] / table[name])[known]))


def _row(panel: str, name: str, table: Table) -> Row:
    smallest = table["variance"] == table["variance"].min()
    logged = panel == "LeNet mnist GS" and name == "i_1" and table["variance"].min() == 1e-5
    return {
        "panel": panel,
        "ε": "1e-6 λmax" if name == "i_undamped" else name.removeprefix("i_"),
        "n": int(_known(table, name).sum()),
        "median I at the least noise": float(np.nanmedian(table[name][smallest])),
        "median RMSE there": float(np.median(table["rmse"][smallest])),
        "RMSE ≥ I as plotted": float(_above(table, name).mean()),
        "RMSE/(I/√N), median": _scale(table, name),
        "r²": _r_squared(table, name),
        "ρ": spearman(table, name, "rmse"),
        "paper": "I 0.0178, RMSE 0.0295 (log)" if logged else "plot only",
    }
