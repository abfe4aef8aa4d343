"""Figure 17 of I²F: I_lb against SSIM and LPIPS."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import Table, bootstrap, judged, spearman, table_of
from simulations.papers.i2f.noise import Noise, Panel, noise_rows
from simulations.papers.judge import not_compared
from simulations.papers.lab import Lab


@dataclass(frozen=True)
class Perception:
    """I_lb and perceptual measures (Zhang et al. 2023, appendix E, figure 17).

    The text calls I_lb positively correlated with both, and a high SSIM and a low LPIPS a high
    risk: as I_lb is a lower bound of the error, the sign with SSIM can be positive only if I_lb
    fails. Both readings are judged. The attacks are those of figures 1 and 2.

    Attributes:
        panels: networks, data and attacks.
        noise: of all panels.
    """

    panels: Sequence[Panel]
    noise: Noise

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        tables = {str(p): table_of(noise_rows(lab, p, self.noise)) for p in self.panels}
        measures = ["ssim"] if lab.lpips is None else ["ssim", "lpips"]
        net = "" if lab.lpips is None else f" ({lab.lpips.net}; the paper's network is not named)"
        return Findings(
            [_row(name, v, t) for name, t in tables.items() for v in self.noise.variances],
            tuple(claim for name, t in tables.items() for claim in _claims(name, t, lab)),
            {"perception": charts.scatters(tables, "i_lb", measures, "I_lb")},
            ATTACKER,
            (
                "Iterations: " + ", ".join(f"{p}: {p.iterations}" for p in self.panels) + ".",
                "An attack that has not converged adds an error of its own to every image: where "
                "the RMSE hardly depends on the noise, iterations set it and not I²F.",
                f"SSIM and LPIPS{net} are of pixels clamped to [0, 1].",
            ),
        )


def _claims(panel: str, table: Table, lab: Lab) -> list[Claim]:
    with_ssim = bootstrap(table, partial(spearman, x="i_lb", y="ssim"))
    claims = [
        judged(
            f"{panel}: I_lb is positively correlated with SSIM (Fig. 17's caption): Spearman's ρ",
            "plot only",
            with_ssim,
            least=0.0,
        ),
        judged(
            f"{panel}: a larger I_lb means less structure (what a lower bound of the error "
            "implies): Spearman's ρ with SSIM",
            "plot only",
            with_ssim,
            most=0.0,
        ),
    ]
    text = f"{panel}: I_lb is positively correlated with LPIPS (Fig. 17): Spearman's ρ"
    if "lpips" not in table:
        why = "LPIPS's backbone is not at hand"
        missing = not_compared(text, "plot only", why)
        return [*claims, missing]
    with_lpips = bootstrap(table, partial(spearman, x="i_lb", y="lpips"))
    return [*claims, judged(text, "plot only", with_lpips, least=0.0)]


def _row(panel: str, variance: float, table: Table) -> Row:
    chosen = table["variance"] == variance
    cells: Row = {"panel": panel, "variance": variance, "n": int(chosen.sum())}
    for name in ("i_lb", "rmse", "ssim", "lpips"):
        if name in table:
            values = table[name][chosen]
            values = values[np.isfinite(values)]
            cells[f"median {name}"] = float(np.median(values)) if len(values) else None
            if name in ("ssim", "lpips"):
                within = {k: v[chosen] for k, v in table.items()}
                cells[f"ρ of I_lb and {name}"] = spearman(within, "i_lb", name)
    cells["paper"] = "plot only"
    return cells
