"""What LAVP's tables are made of: proxies and outcomes of images, and their correlations."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from flwr_leakage import load_preset
from flwr_leakage.attacks import AttackJob
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, ThreatModel
from simulations.papers.findings import Row
from simulations.papers.intervals import mean_interval
from simulations.papers.lab import Lab
from simulations.papers.lavp_printed import OUTCOMES, printed
from simulations.papers.lavp_proxies import PROXIES, exact_proxies, published_proxies
from simulations.papers.numbers import number, numbers
from simulations.papers.parts import blocks
from simulations.papers.rank_correlation import RankCorrelations, rank_correlations
from simulations.papers.single_gradients import Inversion, observe, outcomes
from simulations.papers.training import Recipe

LOSSES: tuple[Literal["L2", "cosine"], ...] = ("L2", "cosine")
ATTACKER = (
    "single gradients of one image each, the model, the label; no BatchNorm statistics. Of several "
    "restarts the one of least MSE to the truth counts, as in the paper, which no attacker can tell"
)


@dataclass(frozen=True)
class ProxyStudy:
    """Networks, images and attacks whose proxies and outcomes are compared.

    Attributes:
        networks: arguments of ``Recipe`` by name, each beside those of ``training``.
        training: arguments of ``Recipe`` that all networks share.
        num_images: first test images, one a gradient.
        iterations: of Adam.
        learning_rate: of Adam.
        tv_weights: of total variation, by loss.
        restarts: of each image; the paper has 3.
        power_iterations: of the published estimator, for each of its four eigenvalues.
        difference_step: h of the published estimator.
        num_draws: of the bootstrap.
        seed: of training, starts and draws.
        ours_seconds: CPU seconds of this project's strongest attack on each image of a network on
            which one of the paper's attacks ends at grey; ``None`` leaves it out.
        block: images in a part; ``None`` for all of them.
    """

    networks: Mapping[str, Mapping[str, Any]]
    training: Mapping[str, Any]
    num_images: int
    iterations: int
    learning_rate: float
    tv_weights: Mapping[str, float]
    restarts: int
    power_iterations: int
    difference_step: float
    num_draws: int
    seed: int
    ours_seconds: float | None = field(default=None, kw_only=True)
    block: int | None = field(default=None, kw_only=True)

    def measure(self, lab: Lab) -> dict[str, list[Row]]:
        """For every network a row an image: exact and published proxies, outcomes by loss.

        The columns ``LOSS judged`` are the errors by which claims are judged: those of the paper's
        attack, of ``strongest`` where it ends at grey and ours does not, and 0 where both do, which
        has no ρ. Those of ``LOSS own`` are 0 where one of the paper's two attacks ends at grey.
        Without ``ours_seconds`` both are those of the paper's attack.
        """
        return {name: self._judged_by(lab, name) for name in self.networks}

    def _judged_by(self, lab: Lab, name: str) -> list[Row]:
        def rows_of(ours: bool) -> list[Row]:
            parts = blocks(0, self.num_images, self.block or self.num_images)
            return [row for part in parts for row in self._measure(lab, name, *part, ours)]

        rows = rows_of(ours=False)
        failed = [loss for loss in LOSSES if _is_blind(rows, loss)]
        asked = self.ours_seconds is not None and bool(failed)
        if asked:
            rows = rows_of(ours=True)
        none = _is_blind(rows, "strongest")
        for row in rows:
            for loss in LOSSES:
                theirs, ours = row[f"{loss} mse"], 0.0 if none else row["strongest mse"]
                row[f"{loss} own"] = 0.0 if asked else theirs
                row[f"{loss} judged"] = ours if asked and loss in failed else theirs
        return rows

    def _measure(self, lab: Lab, name: str, first: int, count: int, ours: bool) -> list[Row]:
        recipe = Recipe(seed=self.seed, **{**self.training, **self.networks[name]})
        trained = lab.train(recipe)
        lab.tell(f"{name}: accuracy {trained.accuracy[recipe.epochs]:.3f}")
        test = lab.data(recipe.data)[1]
        samples = test.batch(list(range(first, first + count)))
        samples = Batch(samples.inputs.to(lab.device), samples.targets.to(lab.device))
        gradient_map = GradientMap(trained.models[recipe.epochs], device=lab.device)
        settings: dict[str, Any] = {"recipe": asdict(recipe) | {"defense": repr(recipe.defense)}}
        settings |= {"num_images": count, "seed": self.seed} | ({"first": first} if first else {})

        def proxies() -> list[Row]:
            exact = exact_proxies(gradient_map, samples)
            return [{k: exact[k][i] for k in PROXIES} for i in range(len(samples))]

        def published() -> list[Row]:
            found = published_proxies(
                gradient_map,
                samples,
                self.power_iterations,
                self.difference_step,
                make_generator(self.seed, purpose="power iteration"),
            )
            return [{f"published {k}": found[k][i] for k in PROXIES} for i in range(len(samples))]

        def attacked(loss: Literal["L2", "cosine"]) -> list[Row]:
            inversion = self._inversion(loss)
            singles = [samples[i : i + 1] for i in range(len(samples))]
            found = inversion(gradient_map, singles, test.spec, self.seed)
            best = []
            for restarts, single in zip(found, singles, strict=True):
                tried = [outcomes(each, single, test.spec, lab.lpips)[0] for each in restarts]
                least = min(tried, key=_mse)
                best.append({f"{loss} {k}": least.get(k) for k in OUTCOMES})
            return best

        def strongest() -> list[Row]:
            threat = ThreatModel(labels="known")
            singles = [samples[i : i + 1] for i in range(len(samples))]
            job = AttackJob(
                gradient_map,
                test.spec,
                observe(gradient_map, singles),
                threat,
                self.seed,
                max_seconds=self.ours_seconds,
            )
            found = load_preset("strongest")(job)
            errors = [
                None if f.batch is None else outcomes(f, single, test.spec, None)[0]["mse"]
                for f, single in zip(found, singles, strict=True)
            ]
            return [{"strongest mse": error} for error in errors]

        parts = [
            lab.rows(f"{name}: exact proxies", settings, proxies),
            lab.rows(
                f"{name}: published proxies",
                {**settings, "iterations": self.power_iterations, "step": self.difference_step},
                published,
            ),
            *[
                lab.rows(
                    f"{name}: {loss} attack",
                    {**settings, "inversion": asdict(self._inversion(loss))},
                    partial(attacked, loss),
                )
                for loss in LOSSES
            ],
        ]
        head: Row = {"network": name, "accuracy": trained.accuracy[recipe.epochs]}
        grey = (test.spec.denormalize(samples.inputs) - 0.5).square().flatten(1).mean(1).tolist()
        merged = []
        for *pieces, blind in zip(*parts, grey, strict=True):
            row = {**head, "grey mse": blind}
            for piece in pieces:
                row |= piece
            merged.append(row | _fusions(row))
        if ours:
            limit = {**settings, "max_seconds": self.ours_seconds}
            found = lab.rows(f"{name}: strongest attack", limit, strongest)
            merged = [row | more for row, more in zip(merged, found, strict=True)]
        return merged

    def _inversion(self, loss: Literal["L2", "cosine"]) -> Inversion:
        weight = self.tv_weights[loss]
        return Inversion(loss, self.iterations, self.learning_rate, weight, 0.0, self.restarts)

    def size(
        self, measured: Mapping[str, list[Row]], loss: str, printed: float | None
    ) -> float | None:
        """What the paper prints, or ``None`` where attacks that ended at grey are judged, too.

        Such an attack tells nothing of a size: a claim is not denied for being small there.
        """
        at_grey = self.ours_seconds is None and told(measured, loss)
        return None if at_grey else printed

    def correlate(self, measured: Mapping[str, list[Row]]) -> RankCorrelations:
        """ρ of all columns, the mean over the networks as in the paper."""
        first = next(iter(measured.values()))[0]
        columns = [c for c in first if c not in _BESIDE and first[c] is not None]
        tables = [
            np.array([[row[c] for c in columns] for row in rows], dtype=float)
            for rows in measured.values()
        ]
        return rank_correlations(columns, tables, self.num_draws, self.seed)


_BESIDE = ("network", "accuracy", "grey mse", "strongest mse")
"""Columns that are neither proxies nor outcomes by which claims are judged."""


def _is_blind(rows: list[Row], attack: str) -> bool:
    """Whether an attack came no nearer than pixels of 0.5, by the interval of the difference."""
    nearer = [
        None if row.get(f"{attack} mse") is None else number(row["grey mse"]) - error
        for row, error in zip(rows, numbers(rows, f"{attack} mse").tolist(), strict=True)
    ]
    known = [value for value in nearer if value is not None]
    return len(known) < 2 or mean_interval(known)[1] <= 0


def told(measured: Mapping[str, list[Row]], loss: str, both: bool = False) -> str:
    """What a claim about attacks by a loss must say of those that failed; mostly empty."""
    attacks = LOSSES if both else (loss,)
    failed = {n: r for n, r in measured.items() if any(_is_blind(r, a) for a in attacks)}
    if not failed:
        return ""
    grey = f"{' or '.join(attacks)} attacks do no better than grey on {', '.join(failed)}"
    asked = [n for n, rows in failed.items() if "strongest mse" in rows[0]]
    if not asked:
        return f"{grey}: judges them too"
    ours = [n for n in asked if not both and not _is_blind(failed[n], "strongest")]
    out = [n for n in failed if n not in ours]
    said = [f"judged by this project's strongest on {', '.join(ours)}"] if ours else []
    said += [f"left out: {', '.join(out)}"] if out else []
    return f"{grey}: {'; '.join(said)}"


def _mse(row: Row) -> float:
    value = row["mse"]
    return np.inf if value is None else float(value)


def _fusions(row: Mapping[str, Any]) -> Row:
    """√(max · ang_min) (Hong et al. 2024, Table 3), exact and published; 0 if negative."""
    found: Row = {}
    for prefix in ("", "published "):
        product = float(row[f"{prefix}max"]) * float(row[f"{prefix}ang_min"])
        found[f"{prefix}fusion"] = max(product, 0.0) ** 0.5
    return found


def cells(
    study: RankCorrelations, row: str, proxies: Sequence[str], networks: Sequence[str]
) -> list[Row]:
    """The table: one row for each loss, proxy, estimator and outcome."""
    found: list[Row] = []
    for loss in LOSSES:
        for proxy in proxies:
            for estimator in ("exact", "published"):
                name = proxy if estimator == "exact" else f"published {proxy}"
                for outcome in OUTCOMES:
                    if f"{loss} {outcome}" not in study.columns or name not in study.columns:
                        continue
                    low, high = study.interval(name, f"{loss} {outcome}")
                    at = study.columns.index(name), study.columns.index(f"{loss} {outcome}")
                    found.append(
                        {
                            "attack": loss,
                            "proxy": proxy,
                            "estimator": estimator,
                            "outcome": outcome,
                            "paper": printed(row, loss, proxy, outcome),
                            "rho": rounded(study.rho(name, f"{loss} {outcome}")),
                            "low": rounded(low),
                            "high": rounded(high),
                            **{
                                f"rho {network}": rounded(float(study.each[(i, *at)]))
                                for i, network in enumerate(networks)
                            },
                        }
                    )
    return found


def rounded(value: float) -> float | None:
    """Three digits; ``None`` of what is not defined."""
    return round(value, 3) if np.isfinite(value) else None


def remarks(measured: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """What a reader must know beside the table."""
    accuracies = ", ".join(f"{name} {rows[0]['accuracy']:.2f}" for name, rows in measured.items())
    spans = []
    for name, rows in measured.items():
        ratios = [float(row["min"] or 0) / float(row["max"] or np.nan) for row in rows]
        zeros = sum(ratio == 0 for ratio in ratios)
        spans.append(f"{name} {min(ratios):.1e} to {max(ratios):.1e} ({zeros} are 0)")
    errors = [
        f"{loss} {np.mean([float(row[f'{loss} mse'] or 0) for row in rows]):.3f} ({name})"
        for loss in LOSSES
        for name, rows in measured.items()
    ]
    return (
        f"Test accuracy: {accuracies}.",
        f"Mean MSE in pixel²: {', '.join(errors)}. Where it is about 0.1 the attack ended far from "
        "the images, and ranks of MSE say little.",
        f"Exact min / max of an image: {'; '.join(spans)}. Where all are 0, J has no full rank, "
        "and min and ang_min have no ρ of that network.",
        "ρ is the mean over the networks that have one; intervals are 95 % percentiles of a "
        "bootstrap over images, the same for all networks.",
        "LPIPS is that of SqueezeNet where its backbone is at hand; the paper takes VGG.",
    )


def sharing(lab: Lab, name: str) -> Lab:
    """The same lab with the finished parts of another experiment, which has the same ones."""
    return replace(lab, part=replace(lab.part, folder=lab.part.folder.parent / name))
