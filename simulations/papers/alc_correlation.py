"""The angular Lipschitz study: do L̃ and L̃cos tell the loss drop and the reconstruction?"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from simulations.papers.alc_figure import against_lipschitz
from simulations.papers.alc_study import ATTACKER, SAID, CheckpointStudy, batch_mean
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.lab import Lab
from simulations.papers.lavp_study import rounded
from simulations.papers.numbers import number
from simulations.papers.rank_correlation import (
    RankCorrelations,
    judge_positive,
    rank_correlations,
)

PRINTED = {
    ("lipschitz", "loss_drop", "both modes"): "-0.78",
    ("lipschitz", "loss_drop", "train"): "-0.87",
    ("lipschitz", "loss_drop", "eval"): "-0.66 (caption) or -0.85 (text)",
    ("gradient_norm", "lpips", "train"): "0.55",
    ("gradient_norm", "lpips", "eval"): "0.40",
    ("lipschitz", "lpips", "train"): "0.79",
    ("lipschitz", "lpips", "eval"): "0.71",
    ("angular_lipschitz", "lpips", "train"): "0.72",
    ("angular_lipschitz", "lpips", "eval"): "0.60",
}
"""Spearman's ρ in Figures 6 and 7; that of both modes is of ConvNets, too."""

_SAID = (
    "n is the number of batches: the bootstrap draws a batch with its rows of all networks, epochs "
    "and modes, as these are of the same images. The networks stay as they are.",
    "A network without skip connections stands in for the paper's ConvNet, of which Figure 6 has "
    "ρ with the ResNets together.",
)

MEASURES = ("gradient_norm", "lipschitz", "angular_lipschitz")


@dataclass(frozen=True)
class LipschitzCorrelation(CheckpointStudy):
    """Angular Lipschitz study, Figures 6 and 7: L̃ with the loss drop, L̃, L̃cos and ‖g‖ with LPIPS.

    Spearman's ρ over all networks, checkpoints and batches, in train mode, in eval mode and in
    both, and for each network. The paper prints ρ over ResNets of three widths and, for the loss
    drop, ConvNets as well. Without LPIPS at hand the squared error takes its place.
    """

    def run(self, lab: Lab) -> Findings:
        """ρ with intervals, and the paper's signs and orderings."""
        rows = self.measure(lab)
        outcome = "lpips" if lab.lpips else "mse_normalised"
        groups: dict[str, Callable[[Row], bool]] = {
            "both modes": lambda row: True,
            "train": lambda row: row["mode"] == "train",
            "eval": lambda row: row["mode"] == "eval",
        }
        for name in self.networks:
            groups[name] = lambda row, name=name: row["network"] == name  # type: ignore[misc]
        table: list[Row] = []
        claims: list[Claim] = []
        for group, within in groups.items():
            found = self._correlate([row for row in rows if within(row)], outcome)
            table += _cells(found, group, outcome)
            claims += _claims(found, group, outcome)
        figure = against_lipschitz(rows, outcome, batch_mean)
        return Findings(table, tuple(claims), {"correlation": figure}, ATTACKER, (*SAID, *_SAID))

    def _correlate(self, rows: list[Row], outcome: str) -> RankCorrelations:
        columns = (*MEASURES, "loss_drop")
        data = [[*(number(row[c]) for c in columns), batch_mean(row, outcome)] for row in rows]
        batches = [int(row["batch"] or 0) for row in rows]
        names = (*columns, outcome)
        return rank_correlations(names, [np.array(data)], self.bootstraps, self.seed, batches)


def _pairs(outcome: str) -> list[tuple[str, str]]:
    return [("lipschitz", "loss_drop"), *((name, outcome) for name in MEASURES)]


def _paper(left: str, right: str, group: str) -> str | None:
    return PRINTED.get((left, right if right == "loss_drop" else "lpips", group))


def _cells(found: RankCorrelations, group: str, outcome: str) -> list[Row]:
    rows: list[Row] = []
    for left, right in _pairs(outcome):
        low, high = found.interval(left, right)
        rows.append(
            {
                "rows": group,
                "pair": f"{left} with {right}",
                "paper": _paper(left, right, group),
                "rho": rounded(found.rho(left, right)),
                "low": rounded(low),
                "high": rounded(high),
                "n": found.units,
            }
        )
    return rows


def _claims(found: RankCorrelations, group: str, outcome: str) -> list[Claim]:
    """Of the groups and pairs that the paper prints."""
    claims = []
    for left, right in _pairs(outcome):
        paper = _paper(left, right, group)
        if paper is None:
            continue
        low, high = found.interval(left, right)
        rho = found.rho(left, right)
        if right == "loss_drop":
            text = f"The loss drop falls with L̃, {group} (Fig. 6); ours is −ρ."
            rho, low, high = -rho, -high, -low
        else:
            text = f"{outcome} rises with {left}, {group} (Fig. 7)."
        size = abs(float(paper.split()[0]))
        claims.append(judge_positive(text, f"ρ = {paper}", rho, low, high, found.units, size=size))
    for left in MEASURES[1:]:
        paper, norm = (_paper(name, outcome, group) for name in (left, "gradient_norm"))
        if paper is not None:
            claims.append(
                judge_positive(
                    f"{left} ranks {outcome} better than the gradient's norm, {group} (Fig. 7).",
                    f"{paper} against {norm}",
                    *found.more(left, "gradient_norm", outcome),
                    found.units,
                    size=float(paper) - float(norm or 0),
                )
            )
    return claims
