"""Figure 16 of I²F: I_lb and the error of attacks on pruned gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.pruning import prune_update
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER
from simulations.papers.i2f.evidence import (
    Table,
    bootstrap,
    judged,
    median_ratio,
    share,
    spearman,
    table_of,
)
from simulations.papers.i2f.influence import Influence
from simulations.papers.i2f.noise import Panel
from simulations.papers.i2f.records import attack_rows
from simulations.papers.i2f.victim import test_images
from simulations.papers.lab import Lab
from simulations.papers.parts import blocks


@dataclass(frozen=True)
class Pruning:
    """I_lb under gradient pruning (Zhang et al. 2023, appendix D, figure 16).

    The ratios are not in the text; the authors' code takes 0.1 to 0.9. Their log of five digits
    (LeNet, MNIST, GS, ratio 0.4) is the only place with numbers.

    Attributes:
        panels: networks, data and attacks.
        ratios: shares of pruned entries.
        images: successive test images.
        first: the first of them.
        seeds: of weights and starts.
    """

    panels: Sequence[Panel]
    ratios: Sequence[float]
    images: int
    first: int
    seeds: Sequence[int]

    def run(self, lab: Lab) -> Findings:
        """Attack, compare, judge."""
        tables = {str(panel): self._table(lab, panel) for panel in self.panels}
        figure = charts.against_equality(tables, "i_lb", "rmse", "I_lb", "RMSE", "ratio")
        return Findings(
            [row for name, table in tables.items() for row in _rows(name, table)],
            tuple(claim for name, table in tables.items() for claim in _claims(name, table)),
            {"pruning": figure},
            ATTACKER,
            (
                "Iterations: " + ", ".join(f"{p}: {p.iterations}" for p in self.panels) + ".",
                "L-BFGS is none of the paper's attacks: it minimises DGL's objective further. "
                "Where an attack's RMSE does not fall with the ratio, its iterations set it, not "
                "the pruning.",
                "Units of normalised inputs. Intervals are of images drawn with replacement, each "
                "with all of its ratios and seeds.",
            ),
        )

    def _table(self, lab: Lab, panel: Panel) -> Table:
        found: list[Row] = []
        for seed, block in product(self.seeds, blocks(self.first, self.images)):
            settings = {
                "panel": panel,
                "images": list(block),
                "seed": seed,
                "ratios": list(self.ratios),
            }
            name = f"{panel}, seed {seed}"
            found += lab.rows(name, settings, partial(self._attack, lab, panel, seed, *block))
        table = dict(table_of(found))
        table["ratio"] = table["perturbation"].astype(float)
        return table

    def _attack(self, lab: Lab, panel: Panel, seed: int, first: int, images: int) -> list[Row]:
        network = panel.victim.build(lab, seed).to(lab.device)
        batch, spec = test_images(lab, panel.victim.data, first, images)
        influence = Influence(network, batch)
        deltas = {f"{ratio:g}": pruned(influence.gradients, ratio) for ratio in self.ratios}
        return attack_rows(
            network,
            batch,
            spec,
            influence,
            deltas,
            panel.attack,
            panel.iterations,
            seed,
            first,
        )


def pruned(gradients: Float[Tensor, "S P"], ratio: float) -> Float[Tensor, "S P"]:
    """δ of each sample: minus the entries of smallest magnitude."""
    kept = [prune_update({"g": gradient}, ratio)["g"] for gradient in gradients]
    return torch.stack(kept) - gradients


def _claims(panel: str, table: Table) -> list[Claim]:
    return [
        judged(
            f"{panel}: I_lb bounds ‖x̂ − x‖ from below (appendix D): share of attacks",
            "plot only",
            share(table, lambda t: t["rmse"] * t["root"] >= t["i_lb"]),
            least=0.95,
        ),
        judged(
            f"{panel}: I_lb estimates the RMSE as plotted (Fig. 16): RMSE/I_lb",
            "plot only; log: 3.1 to 5.8",
            bootstrap(table, lambda t: median_ratio(t, "rmse", "i_lb")),
            1 / 3,
            6,
            reason="a root mean square over a norm",
        ),
        judged(
            f"{panel}: the RMSE grows with I_lb (Fig. 16): Spearman's ρ over all ratios",
            "plot only",
            bootstrap(table, lambda t: spearman(t, "i_lb", "rmse")),
            least=0.5,
        ),
    ]


def _rows(panel: str, table: Table) -> list[Row]:
    rows: list[Row] = []
    for ratio in np.unique(table["ratio"]):
        chosen = table["ratio"] == ratio
        logged = panel == "LeNet mnist GS" and ratio == 0.4
        rows.append(
            {
                "panel": panel,
                "ratio": float(ratio),
                "n": int(chosen.sum()),
                "median λmax": float(np.median(table["lambda_max"][chosen])),
                "median I_lb": float(np.median(table["i_lb"][chosen])),
                "median RMSE": float(np.median(table["rmse"][chosen])),
                "median objective": float(np.median(table["objective"][chosen])),
                "paper": "λmax 2.7, I_lb 0.0030, RMSE 0.0142 (log)" if logged else "plot only",
            }
        )
    return rows
