"""Figures 10 and 11 of I²F: what I_lb costs, and what an attack costs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import nn

from flwr_leakage.operators import row_norms
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.spectral import gradient_start, largest_eigenvalue, random_start
from simulations.papers.findings import Claim, Findings, Row
from simulations.papers.i2f import charts
from simulations.papers.i2f.attack import ATTACKER, attack_gradients, attack_of
from simulations.papers.i2f.evidence import Table, bootstrap, judged, median_ratio, share, table_of
from simulations.papers.i2f.influence import Influence
from simulations.papers.i2f.victim import Victim, test_images
from simulations.papers.judge import not_compared
from simulations.papers.lab import Lab
from simulations.papers.parts import blocks

TOLERANCE = 1e-2


@dataclass(frozen=True)
class Cost:
    """The time of I_lb beside that of an attack (Zhang et al. 2023, appendix C.3).

    I_lb is ‖Jδ‖ and 50 power iterations, as in figure 10; beside it this package's Lanczos process
    to 1 %. An attack is GS on one image; ``timed`` of its iterations are measured, and its time is
    that of 3,000, the paper's number: every iteration does the same work. CPU seconds of one
    process.

    Attributes:
        victims: networks and data.
        images: successive test images, each on its own.
        first: the first of them.
        seeds: of weights and starts.
        timed: iterations of the attack that are measured.
        power_iterations: of I_lb.
        attack_iterations: of which the attack's time is told.
    """

    victims: Sequence[Victim]
    images: int
    first: int
    seeds: Sequence[int]
    timed: int
    power_iterations: int = 50
    attack_iterations: int = 3000

    def run(self, lab: Lab) -> Findings:
        """Measure, judge."""
        tables = {_name(victim): self._table(lab, victim) for victim in self.victims}
        ratios = {name: {"": table["attack"] / table["power"]} for name, table in tables.items()}
        drawn = {"attack/I_lb": {name: values[""] for name, values in ratios.items()}}
        return Findings(
            [self._row(name, table) for name, table in tables.items()],
            (*self._claims(tables), *self._missing()),
            {"cost": charts.boxes(drawn, "CPU time ratio")},
            ATTACKER,
            (
                f"{self.timed} iterations of each attack are measured; "
                f"{self.attack_iterations:,} are told.",
                "Power iterations are counted until the value is within 1 % of λmax by Lanczos to "
                "0.1 %.",
            ),
        )

    def _table(self, lab: Lab, victim: Victim) -> Table:
        found: list[Row] = []
        for seed, block in product(self.seeds, blocks(self.first, self.images)):
            settings = {
                "victim": victim,
                "images": list(block),
                "seed": seed,
                "timed": self.timed,
                "power_iterations": self.power_iterations,
            }
            name = f"{_name(victim)}, seed {seed}"
            found += lab.rows(name, settings, partial(self._measure, lab, victim, seed, *block))
        table = dict(table_of(found))
        table["attack"] = table["attack_iteration"] * self.attack_iterations
        return table

    def _measure(self, lab: Lab, victim: Victim, seed: int, first: int, images: int) -> list[Row]:
        network = victim.build(lab, seed).to(lab.device)
        batch, spec = test_images(lab, victim.data, first, images)
        rows: list[Row] = []
        for place in range(images):
            sample = batch[place : place + 1]
            size = sum(value.numel() for value in network.parameters())
            timed = self._time(network, sample, spec, seed)
            rows.append({"image": first + place, "seed": seed, "parameters": size, **timed})
        return rows

    def _time(self, network: nn.Module, sample: Batch, spec: InputSpec, seed: int) -> Row:
        began = time.process_time()
        influence = Influence(network, sample, torch.float32)
        built = time.process_time() - began
        operator = influence.operator
        generator = make_generator(seed, purpose="lanczos")
        began = time.process_time()
        largest_eigenvalue(operator, gradient_start(operator, generator), TOLERANCE, 200)
        lanczos = time.process_time() - began
        start = gradient_start(operator, generator)
        reference = float(largest_eigenvalue(operator, start, 1e-3, 400).estimate.value)
        began = time.process_time()
        row_norms(operator.rmatvec(operator.value))
        vector = random_start(operator, generator)
        values = []
        for _ in range(self.power_iterations):
            vector = vector / vector.norm()
            image = operator.gram(vector)
            values.append(float((vector * image).sum()))
            vector = image
        power = time.process_time() - began
        near = [abs(value / reference - 1) <= TOLERANCE for value in values]
        attack = attack_of("GS", self.timed)
        gradients = [operator.value.float()]
        began = time.process_time()
        attack_gradients(attack, network, spec, gradients, sample.targets, seed)
        attacked = time.process_time() - began
        return {
            "power": power,
            "lanczos": lanczos,
            "built": built,
            "attack_iteration": attacked / (self.timed + 1),
            "needed": near.index(True) + 1 if any(near) else None,
            "within": float(any(near)),
        }

    def _claims(self, tables: dict[str, Table]) -> list[Claim]:
        claims = []
        for name, table in tables.items():
            claims.append(
                judged(
                    f"{name}: λmax is found within {self.power_iterations} power iterations (Fig. "
                    "10): share of images, to 1 %",
                    "all (ResNet-18, CIFAR-10)",
                    share(table, lambda t: t["within"] == 1.0),
                    least=0.95,
                )
            )
            least = 20.0 if name.startswith("ResNet") else 1.0
            claims.append(
                judged(
                    f"{name}: an attack takes longer than I_lb (Fig. 10, 11): ratio of times",
                    "20 (ResNet-18, CIFAR-10)"
                    if least > 1
                    else "plot only (> 1 nearly everywhere)",
                    bootstrap(table, lambda t: median_ratio(t, "attack", "power")),
                    least=least,
                )
            )
        return claims

    def _missing(self) -> list[Claim]:
        there = {victim.network for victim in self.victims}
        claims = []
        if "ResNet18" not in there:
            text = "ResNet-18, CIFAR-10: an attack takes 20 times as long as I_lb (appendix C.3)"
            claims.append(not_compared(text, "20", "ResNet-18 is not measured at this size"))
        if "ResNet34" not in there:
            text = "above ResNet-18 the ratio is far larger than 500 (Fig. 11)"
            why = "networks above ResNet-18 are not measured at this size"
            claims.append(not_compared(text, "> 500", why))
        return claims

    def _row(self, name: str, table: Table) -> Row:
        median = {
            key: float(np.nanmedian(table[key])) if np.isfinite(table[key]).any() else None
            for key in ("power", "lanczos", "attack_iteration", "attack", "needed")
        }
        return {
            "network": name,
            "parameters": int(table["parameters"][0]),
            "n": len(table["power"]),
            "power iterations to 1 %, median": median["needed"],
            f"I_lb, {self.power_iterations} power iterations, s": median["power"],
            "λmax by Lanczos to 1 %, s": median["lanczos"],
            "attack, s an iteration": median["attack_iteration"],
            f"attack, s of {self.attack_iterations}": median["attack"],
            "attack / I_lb": median_ratio(table, "attack", "power"),
            "attack / Lanczos": median_ratio(table, "attack", "lanczos"),
            "paper": "≤ 5 s, 150 s (one GPU)" if name == "ResNet18 cifar10" else "plot only",
        }


def _name(victim: Victim) -> str:
    width = victim.options.get("width")
    return f"{victim}, width {width}" if width else str(victim)
