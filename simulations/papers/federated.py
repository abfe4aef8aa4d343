"""Leakage over the rounds of a federation, and whether a client's score foretells it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure
from scipy import stats

from simulations.papers.federated_runs import SIGNS, FederationStudy, best_rate
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f.evidence import Table, bootstrap, judged, spearman, table_of
from simulations.papers.intervals import means
from simulations.papers.judge import by_difference, not_compared
from simulations.papers.lab import Lab

PRINTED = {"gradient_norm": "-0.35", "lambda_max": "-0.51"}
"""LAVP's Table 1, CIFAR-10 and L2."""


@dataclass(frozen=True)
class LeakageOverRounds(FederationStudy):
    """Leakage over rounds under FedAvg and FedAdam, IID and Dirichlet, with and without defenses.

    A federation trains from one initialisation; every few rounds the server attacks each client's
    update, and each client has scored the same samples before it sent them. Beside the leak stand
    the accuracy and the correlation of a score in round t with what the server got in round t.
    Where a strategy has several server rates to choose from, it takes the one of the best accuracy
    in runs of another seed without attacks: leakage is not looked at.
    """

    def run(self, lab: Lab) -> Findings:
        """Run every federation; then accuracy and leakage by round, and what scores foretell."""
        samples, tried = self.measure(lab)
        table = [
            self._cells([r for r in samples if _key(r) == key])
            for key in dict.fromkeys(_key(row) for row in samples)
        ]
        return Findings(
            [*table, *tried],
            (*self._judge_defenses(samples), *self._judge_scores(samples), *self._late(samples)),
            {"federated_leakage": _figure(table)},
            "the updates, the model and the local schedule; labels are inferred.",
            (
                "No paper has this table; where a number of a paper stands beside, it is of single "
                "images and another network.",
                "Intervals of claims are of clients, each with its images in all rounds and runs: "
                "n is their number. Those of the table are of images.",
                "Clients of one run share its weights.",
                *(
                    f"{name}: server rate {best_rate(tried, name):g}, of {list(rates)}: the best "
                    "mean accuracy over the partitions after the last round in runs of seed "
                    f"{self.tuning_seed}, without attacks or defenses."
                    for name, rates in self.server_rates.items()
                ),
            ),
        )

    def _cells(self, rows: Sequence[Row]) -> Row:
        first = rows[0]
        cells: Row = {
            "strategy": first["strategy"],
            "partition": first["partition"],
            "defense": first["defense"],
            "round": first["round"],
            "n": len(rows),
        }
        # The accuracy is one number a run, whatever the number of its images.
        cells["accuracy"] = sum(float(row["accuracy"] or 0) for row in rows) / len(rows)
        return cells | means(rows, ("psnr",))

    def _judge_defenses(self, samples: Sequence[Row]) -> Iterator[Claim]:
        for defense in self.defenses:
            if defense != "none":
                text = f"{defense} hides: PSNR less that of no defense, all federations."
                mine = [row for row in samples if row["defense"] == defense]
                none = [row for row in samples if row["defense"] == "none"]
                yield _difference(text, mine, none)

    def _judge_scores(self, samples: Sequence[Row]) -> Iterator[Claim]:
        """The correlation of a score and PSNR among the images of undefended rounds."""
        plain = [row for row in samples if row["defense"] == "none"]
        for score, sign in SIGNS.items():
            text = f"A client's {score} in round t foretells PSNR in round t: Spearman, no defense"
            ranks = _within_rounds(plain, score)
            if not ranks:
                yield not_compared(f"{text}.", PRINTED[score], "the score was not measured")
                continue
            found = bootstrap(ranks, partial(spearman, x="score", y="psnr"), "client")
            least, most = (0.0, math.inf) if sign > 0 else (-math.inf, 0.0)
            size = abs(float(PRINTED[score]))
            place = f"{text} (LAVP, Table 1)."
            yield judged(place, PRINTED[score], found, least, most, size=size)

    def _late(self, samples: Sequence[Row]) -> Iterator[Claim]:
        """One claim a strategy: a pool of them would hide that one of them diverges."""
        rounds = sorted({int(row["round"] or 0) for row in samples})
        for strategy in self.strategies:
            mine = [r for r in samples if (r["defense"], r["strategy"]) == ("none", strategy)]
            late, early = (
                [row for row in mine if row["round"] == number]
                for number in (rounds[-1], rounds[0])
            )
            when = f"in round {rounds[-1]} than in round {rounds[0]}"
            text = f"{strategy}: updates leak less {when}: difference of PSNR, no defense."
            yield _difference(text, late, early)


Value = str | int | float | None


def _key(row: Row) -> tuple[Value, ...]:
    return tuple(row[name] for name in ("strategy", "partition", "defense", "round"))


def _client(row: Row) -> str:
    """Whose images a row is of: federations of one partition and seed have the same clients."""
    return f"{row['partition']}, seed {row['seed']}, client {row['client']}"


def _within_rounds(rows: Sequence[Row], score: str) -> Table:
    """Ranks within each federation and round, as the weights of such a group are the same."""
    groups: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        if row.get(score) is not None and row.get("psnr") is not None:
            groups.setdefault((*_key(row), row["seed"]), []).append(row)
    ranked: list[Row] = []
    for group in groups.values():
        ranks = [
            (stats.rankdata([float(row[name] or 0) for row in group]) - 0.5) / len(group)
            for name in (score, "psnr")
        ]
        for row, left, right in zip(group, *ranks, strict=True):
            ranked.append({"client": _client(row), "score": float(left), "psnr": float(right)})
    return table_of(ranked)


def _difference(text: str, first: Sequence[Row], second: Sequence[Row]) -> Claim:
    """The mean PSNR of clients, first less second; clients that one of the two lacks are left out.

    Both sides are of the same images, so that they are pairs.
    """
    left, right = _by_client(first), _by_client(second)
    both = [client for client in left if client in right]
    if len(both) < 2:
        return not_compared(text, "–", "too few images were reconstructed")
    return by_difference(text, -1.0, [left[c] for c in both], [right[c] for c in both], "–")


def _by_client(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if (value := row.get("psnr")) is not None:
            found.setdefault(_client(row), []).append(float(value))
    return {client: sum(values) / len(values) for client, values in found.items()}


def _figure(table: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        if row.get("psnr") is not None:
            name = f"{row['strategy']}, {row['partition']}, {row['defense']}"
            lines.setdefault(name, []).append((float(row["round"] or 0), float(row["psnr"] or 0)))
    for name, points in lines.items():
        style = {"none": "-", "pruning": "--"}.get(name.rpartition(", ")[2], ":")
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("PSNR, dB (higher: leaks more)")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
