"""What the strongest attack reads from updates that a gate let pass, of servers that follow the
protocol.

    python -m simulations.benchmarks.gate_honest --root FOLDER --output rows.jsonl

``FOLDER`` holds ``mnist_train.npz`` and ``mnist_test.npz``. Each of ``--clients`` clients of a
network takes one step on digits of its own, averaged to 14×14 pixels, under weights of a seed of
its own. Its gate measures the update, and then, if it does not pass, updates with more and more
noise, as a client does. What passes is attacked by ``strongest`` with
``--server-seconds`` of the CPU, with other random draws than the client's own attack had. Labels
are inferred. The table counts the images of passed updates that this attack leaves recognisable or
better, with Clopper–Pearson's interval at 95 %, and how many updates passed and under which noise.

A row is appended to ``--output`` as soon as it is known; rows that are there are not run again.
One thread a process.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import beta
from torch import nn

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.self_attack import SelfAttack
from flwr_leakage.defenses import Defense, GaussianNoise, LocalRound, NoDefense
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.models import MLP, LeNet, initialize
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.compute import compute_scores
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_portfolio import read_rows
from simulations.benchmarks.gate_server import SPEC, read_digits

RATE = 0.1
READ = ("recognisable", "exact")

NETWORKS = ("LeNet", "MLP", "ConvNet")
SIZES = {"LeNet": 1, "MLP": 4, "ConvNet": 1}
"""Digits of a client's step."""

NOISES = (0.01, 0.1, 1.0, 10.0)
"""Of the gradient's norm. The first two are those of ``conf/gate/grade.yaml``."""

STRONGER = tuple(GaussianNoise(noise_std=size, relative_to="gradient") for size in NOISES)


@dataclass(frozen=True)
class Policy:
    """A gate, and the self-attack that it holds against its limit, if any."""

    gate: Gate
    attack: str = ""

    def passes(self, gradient_map: GradientMap, exposure: Exposure, seconds: float) -> bool:
        """Return whether the gate lets an update go."""
        if not self.attack:
            scores = compute_scores([GradientNorm()], gradient_map, exposure).values()
            return self.gate.judge([m for result in scores for m in result], None).passes
        own = SelfAttack(load_preset(self.attack), max_seconds=seconds, probe_sizes=())
        found = own.run(gradient_map, SPEC, exposure, server_round=1, client_id=0)
        return self.gate.judge([], found).passes


POLICIES = {
    "gradient norm ≤ 10": Policy(Gate(scores={"gradient_norm": 10.0})),
    "grade partly, idlg": Policy(Gate(grade="partly", stronger=STRONGER), "idlg"),
    "grade partly, strongest": Policy(Gate(grade="partly", stronger=STRONGER), "strongest"),
    "grade nothing, strongest": Policy(Gate(grade="nothing", stronger=STRONGER), "strongest"),
}


def make_network(name: str) -> nn.Module:
    """Return an untrained network, with weights from torch's global generator."""
    if name == "MLP":
        return MLP(SPEC.shape, 10, (64,))
    if name == "LeNet":
        network = LeNet(SPEC.shape, 10, num_convolutions=3)
        return initialize(network, "uniform", lab.generator(torch.initial_seed()))
    return lab.ConvNet(SPEC.shape, 10, 8, (1, 1), (1, 1), (), use_batch_norm=False)


def run_client(
    policy: str, name: str, client: int, digits: Batch, given: argparse.Namespace
) -> None:
    """Let one client's gate decide, attack what passes, and append a row."""
    key = {"policy": policy, "network": name, "client": client, "seed": given.seed + client}
    if any(all(row[k] == v for k, v in key.items()) for row in read_rows(given.output)):
        return
    torch.manual_seed(given.seed + client)
    gradient_map, gate = GradientMap(make_network(name).eval()), POLICIES[policy].gate
    row: dict[str, Any] = {**key, "passed": None, "grades": []}
    with lab.Stopwatch() as watch:
        defenses: list[Defense] = [NoDefense(), *gate.stronger]
        for number, defense in enumerate(defenses):
            exposure = send(gradient_map, digits, defense, given.seed + client)
            if POLICIES[policy].passes(gradient_map, exposure, given.gate_seconds):
                row["passed"] = number
                break
    row["gate_seconds"] = watch.seconds
    if row["passed"] is not None:
        server = SelfAttack(
            load_preset("strongest"), max_seconds=given.server_seconds, seed=1, probe_sizes=()
        )
        found = server.run(gradient_map, SPEC, exposure, server_round=1, client_id=1)
        row |= {"grades": found.grades, "psnr": found.psnr, "problem": found.problem}
    with given.output.open("a") as file:
        file.write(json.dumps(row) + "\n")


def send(gradient_map: GradientMap, batch: Batch, defense: Defense, seed: int) -> Exposure:
    """Return the exposure of one step, with the rounding of float32 in what is sent."""
    params, schedule = gradient_map.params, LocalSchedule(RATE, 1, len(batch))
    trained = local_update(gradient_map, params, batch, schedule)
    sent = {k: ((params[k] + v) - params[k]).detach() for k, v in trained.items()}
    raw = Update(sent, {}, schedule, len(batch))
    seen = LocalRound(gradient_map, params, {}, batch, batch)
    released = defense.on_update(raw, Reproducible.from_seed(seed, purpose="gate"), seen)
    return Exposure(params, {}, batch, batch, raw, released)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print what passed and what was read of it, a row for each gate and network."""
    passed = f"passed: plain, noise {', '.join(f'{size:g}' for size in NOISES)}"
    lab.print_header("gate", "network", "clients", passed, "images", "read", "95 %", "CPU s a gate")
    for policy in POLICIES:
        for name in (*NETWORKS, "all"):
            own = [r for r in rows if r["policy"] == policy and name in ("all", r["network"])]
            if not own:
                continue
            by = Counter(row["passed"] for row in own)
            grades = [grade for row in own for grade in row["grades"]]
            read, count = sum(grade in READ for grade in grades), len(grades)
            low = float(beta.ppf(0.025, read, count - read + 1)) if read else 0.0
            high = float(beta.ppf(0.975, read + 1, count - read)) if read < count else 1.0
            seconds = sum(row["gate_seconds"] for row in own) / len(own)
            ways = ", ".join(str(by[number]) for number in range(len(NOISES) + 1))
            interval = f"{low:.1%} to {high:.1%}" if count else ""
            cells = (str(len(own)), ways, str(count), str(read), interval, f"{seconds:.1f}")
            lab.print_row(policy, name, *cells)
    count = sum(row["passed"] is not None for row in rows)
    print(f"\n{count} updates passed, of {len(rows)}.")


def main() -> None:
    """Read the command line, run what is missing, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--first", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--clients", type=int, default=25, help="of each gate and network")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--gate-seconds", type=float, default=20.0)
    parser.add_argument("--server-seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended")
    lab.add_processes(parser)
    given = lab.start(parser)
    digits = read_digits("mnist_test.npz", given.root, given.first, 4 * given.clients)
    lab.run_all(
        run_client,
        [
            (policy, name, client, digits[slice(4 * client, 4 * client + SIZES[name])], given)
            for client in range(given.clients)
            for policy in given.policies
            for name in NETWORKS
        ],
        given,
    )
    print_table(read_rows(given.output))


if __name__ == "__main__":
    main()
