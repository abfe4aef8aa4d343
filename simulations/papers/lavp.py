"""LAVP's tables: do curvatures of an attack's loss at the truth rank how well images come back?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.lab import Lab
from simulations.papers.lavp_figure import scatter
from simulations.papers.lavp_printed import printed
from simulations.papers.lavp_proxies import PROXIES
from simulations.papers.lavp_study import (
    ATTACKER,
    LOSSES,
    ProxyStudy,
    cells,
    remarks,
    sharing,
    told,
)
from simulations.papers.rank_correlation import RankCorrelations, judge_positive


@dataclass(frozen=True)
class ProxyTable(ProxyStudy):
    """LAVP's Tables 1 and 2: Spearman's ρ of five proxies with four outcomes of two attacks.

    Hong et al. 2024 propose the extreme eigenvalues of the Hessian of an attack's own loss at the
    truth: ``max`` and ``min`` for L2, ``ang_max`` and ``ang_min`` for the cosine distance. Each is
    computed twice: exactly, from the dense Hessian, and as the paper does, by power iteration with
    finite differences.

    Attributes:
        row: of the paper's tables, ``CIFAR-10`` or ``ImageNet``.
        parts_of: the experiment whose finished parts are read.
    """

    row: Literal["CIFAR-10", "ImageNet"] = "CIFAR-10"
    parts_of: str = "lavp_table1"

    def run(self, lab: Lab) -> Findings:
        """The cells, and the paper's orderings."""
        lab = sharing(lab, self.parts_of)
        measured = self.measure(lab)
        found = self.correlate(measured)
        names = list(measured)
        return Findings(
            cells(found, self.row, PROXIES, names),
            tuple(self._claims(found, measured)),
            {"proxies": scatter(measured)},
            ATTACKER,
            remarks(measured),
        )

    def _claims(self, found: RankCorrelations, measured: Mapping[str, list[Row]]) -> list[Claim]:
        table = "Table 1" if self.row == "CIFAR-10" else "Table 2"
        claims = []
        for loss, names in (("L2", ("max", "min")), ("cosine", ("ang_max", "ang_min"))):
            outcome = f"{loss} judged"
            for name in names:
                paper = printed(self.row, loss, name, "mse")
                claims.append(
                    judge_positive(
                        f"{name} rises with the MSE of {loss} attacks ({table}).",
                        f"ρ = {paper}",
                        found.rho(name, outcome),
                        *found.interval(name, outcome),
                        found.units,
                        told(measured, loss),
                        self.size(measured, loss, paper),
                    )
                )
                norm = printed(self.row, loss, "grad_norm", "mse")
                claims.append(
                    judge_positive(
                        f"{name} ranks the MSE of {loss} attacks better than the gradient norm "
                        f"({table}).",
                        f"{paper} against {norm}",
                        *found.more(name, "grad_norm", outcome),
                        found.units,
                        told(measured, loss),
                        self.size(measured, loss, (paper or 0) - (norm or 0)),
                    )
                )
        for proxy, own, other in (("max", "L2", "cosine"), ("ang_min", "cosine", "L2")):
            pair = [printed(self.row, loss, proxy, "mse") for loss in (own, other)]
            reason = told(measured, own, both=True)
            gap = self.size(measured, own, (pair[0] or 0) - (pair[1] or 0))
            claims.append(self._aware(found, proxy, own, other, pair, table, reason, gap))
        for name in PROXIES[1:]:
            claims.append(
                judge_positive(
                    f"The published estimator of {name} orders the images as the exact value does "
                    "(Algorithm 1).",
                    "not measured",
                    found.rho(f"published {name}", name),
                    *found.interval(f"published {name}", name),
                    found.units,
                )
            )
        return claims

    def _aware(
        self,
        found: RankCorrelations,
        proxy: str,
        own: str,
        other: str,
        pair: Sequence[float | None],
        table: str,
        reason: str,
        size: float | None,
    ) -> Claim:
        """A proxy of one loss says more about attacks by this loss than by the other one."""
        mine, theirs = f"{own} own", f"{other} own"
        ours, low, high = found.gap(proxy, mine, theirs)
        return judge_positive(
            f"{proxy} is loss-aware: it ranks {own} attacks better than {other} ones ({table}).",
            f"{pair[0]} against {pair[1]}",
            ours,
            low,
            high,
            found.units,
            reason,
            size,
        )


@dataclass(frozen=True)
class Fusion(ProxyStudy):
    """LAVP's Table 3: √(max · ang_min) for a client that does not know the attacker's loss.

    Hong et al. 2024 fuse the proxies of both losses by their geometric mean. The images, networks
    and attacks are those of ``lavp_table1``.

    Attributes:
        parts_of: the experiment whose finished parts are read.
    """

    parts_of: str = "lavp_table1"

    def run(self, lab: Lab) -> Findings:
        """The cells of the fusion and of the gradient norm."""
        lab = sharing(lab, self.parts_of)
        measured = self.measure(lab)
        found = self.correlate(measured)
        claims = []
        for loss in LOSSES:
            outcome = f"{loss} judged"
            paper, norm = (
                printed("CIFAR-10", loss, name, "mse") for name in ("fusion", "grad_norm")
            )
            text = f"The fusion ranks the MSE of {loss} attacks better than the gradient norm"
            misprint = "; the printed cell repeats Table 1's cell of the gradient norm"
            claims.append(
                judge_positive(
                    f"{text} (Table 3).",
                    f"{paper} against {norm}{misprint if paper == norm else ''}",
                    *found.more("fusion", "grad_norm", outcome),
                    found.units,
                    told(measured, loss),
                    self.size(measured, loss, (paper or 0) - (norm or 0)),
                )
            )
            claims.append(
                judge_positive(
                    f"The fusion rises with the MSE of {loss} attacks (Table 3).",
                    f"ρ = {paper}",
                    found.rho("fusion", outcome),
                    *found.interval("fusion", outcome),
                    found.units,
                    told(measured, loss),
                    self.size(measured, loss, paper),
                )
            )
        rows = cells(found, "CIFAR-10", ("grad_norm", "fusion"), list(measured))
        figure = scatter(measured, (("L2", "fusion"), ("cosine", "fusion")))
        return Findings(rows, tuple(claims), {"fusion": figure}, ATTACKER, remarks(measured))
