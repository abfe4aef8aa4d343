"""Federations that are attacked while they train: how they run, and their server's rate."""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from flwr_leakage.simulation.config import compose
from flwr_leakage.simulation.run import launch
from flwr_leakage.tracking import RunData, read_run
from simulations.papers.findings import Row
from simulations.papers.lab import Lab

SIGNS = {"gradient_norm": -1.0, "lambda_max": -1.0}
"""Of the correlation with PSNR that LAVP (Hong et al. 2024, Table 1) reports under L2 attacks."""

_CHOSEN = ("strategies", "partitions", "defenses", "seeds", "server_rates", "tuning_seed")
"""Settings of which each part has its own."""


@dataclass(frozen=True)
class FederationStudy:
    """Federations of every strategy, partition and defense from one initialisation.

    Attributes:
        overrides: of the default config, for every run: data, model, attack.
        strategies: options of the group ``strategy``.
        partitions: options of the group ``partition``.
        defenses: options of the group ``defense``.
        clients: in each federation.
        rounds: of training.
        every: rounds from one attack to the next.
        images: of a client in a round, all in one step.
        seeds: of the runs.
        server_rates: of a strategy, to choose from; by its name.
        tuning_seed: of the runs that choose.
    """

    overrides: Sequence[str]
    strategies: Sequence[str]
    partitions: Sequence[str]
    defenses: Sequence[str]
    clients: int
    rounds: int
    every: int
    images: int
    seeds: Sequence[int] = (100,)
    server_rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tuning_seed: int = 0

    def measure(self, lab: Lab) -> tuple[list[Row], list[Row]]:
        """A row for each attacked image of each federation; the rates that were tried."""
        tried = self._try_rates(lab)
        samples: list[Row] = []
        for strategy, partition, defense, seed in itertools.product(
            self.strategies, self.partitions, self.defenses, self.seeds
        ):
            chosen = (strategy, partition, defense, seed, best_rate(tried, strategy))
            name = f"{strategy}, {partition}, {defense}, seed {seed}"
            settings = {**self._common(), "chosen": list(chosen)}
            samples += lab.rows(name, settings, partial(self._federate, *chosen))
        return samples, tried

    def _common(self) -> dict[str, object]:
        """The settings that all runs share."""
        return {name: value for name, value in asdict(self).items() if name not in _CHOSEN}

    def _federate(
        self, strategy: str, partition: str, defense: str, seed: int, rate: float | None
    ) -> list[Row]:
        found = self._launch(strategy, partition, defense, seed, rate)
        beside: Row = {"strategy": strategy, "partition": partition, "defense": defense}
        return [{**beside, "seed": seed, **row} for row in _samples(found)]

    def _launch(
        self,
        strategy: str,
        partition: str,
        defense: str,
        seed: int,
        rate: float | None,
        more: Sequence[str] = (),
    ) -> RunData:
        with tempfile.TemporaryDirectory() as folder:
            overrides = [
                f"strategy={strategy}",
                *([] if rate is None else [f"strategy.eta={rate}"]),
                f"partition={partition}",
                f"defense={defense}",
                f"seed={seed}",
                f"num_clients={self.clients}",
                f"num_rounds={self.rounds}",
                f"selection.every={self.every}",
                f"client.num_examples={self.images}",
                f"client.batch_size={self.images}",
                "client.num_steps=1",
                "selection.max_examples=null",
                "scoring.relative_cost=null",
                f"scoring.every={self.every}",
                "server.attack_max_seconds=null",
                "what_if=null",
                *self.overrides,
                *more,
            ]
            launch(compose(overrides, folder))
            return read_run(Path(folder))

    def _try_rates(self, lab: Lab) -> list[Row]:
        """The accuracy after the last round by strategy, rate and partition, without attacks."""
        tried: list[Row] = []
        for strategy, rates in self.server_rates.items():
            for rate, partition in itertools.product(rates, self.partitions):
                place = (strategy, partition, "none", self.tuning_seed, float(rate))
                compute = partial(self._accuracy, *place)
                name = f"{strategy} at rate {rate:g}, {partition}, seed {self.tuning_seed}"
                tried += lab.rows(name, {**self._common(), "tried": list(place)}, compute)
        return tried

    def _accuracy(
        self, strategy: str, partition: str, defense: str, seed: int, rate: float
    ) -> list[Row]:
        quiet = (f"selection.first={self.rounds + 1}", "score=none")
        found = self._launch(strategy, partition, defense, seed, rate, quiet)
        last = max(
            (r for r in found.records if r.name == "test_accuracy"), key=lambda r: r.server_round
        )
        return [
            {
                "strategy": f"{strategy}, rate tried",
                "partition": partition,
                "defense": defense,
                "round": last.server_round,
                "server rate": rate,
                "accuracy": last.value,
            }
        ]


def best_rate(tried: Sequence[Row], strategy: str) -> float | None:
    """The rate of the best mean accuracy over the partitions; ``None`` where none was tried."""
    found: dict[float, list[float]] = {}
    for row in tried:
        if row["strategy"] == f"{strategy}, rate tried":
            found.setdefault(float(row["server rate"] or 0), []).append(float(row["accuracy"] or 0))
    return max(found, key=lambda rate: sum(found[rate]) / len(found[rate])) if found else None


def _samples(found: RunData) -> list[Row]:
    """One row for each attacked image: its scores, its PSNR, the accuracy after the round."""
    rows: dict[tuple[int, int, int], Row] = {}
    accuracy: dict[int, float | None] = {}
    for record in found.records:
        if record.name == "test_accuracy":
            accuracy[record.server_round] = record.value
        wanted = record.name == "psnr" or (record.kind == "score" and record.name in SIGNS)
        if wanted and record.sample >= 0:
            where = (record.server_round, record.client_id, record.sample)
            rows.setdefault(where, {})[record.name] = record.value
    found_rows: list[Row] = []
    for (server_round, client, sample), row in sorted(rows.items()):
        if "psnr" in row:
            place: Row = {"round": server_round, "client": client, "sample": sample}
            found_rows.append({**place, "accuracy": accuracy[server_round], **row})
    return found_rows
