"""What it takes to attack the updates of a large federation on several machines.

    python -m simulations.benchmarks.plan
    python -m simulations.benchmarks.plan --clients 1000 --rounds 100 --machines 16 --cores 8

Small runs are kept, attacked in two shards and merged; they give the costs of a unit. With them the
large federation is simulated: each target takes the seconds of one that was measured, drawn anew,
and a machine that fails loses what it is at and comes back.
"""

import argparse
import heapq
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flwr_leakage.attacks import Attack, AttackJob
from flwr_leakage.audit import ServerAudit
from flwr_leakage.audit.later import KeptRun
from flwr_leakage.audit.shards import Shard, attack_shard, merge_shards
from flwr_leakage.flower import run_inline
from flwr_leakage.records import Reconstruction
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from flwr_leakage.simulation.later import kept_run
from flwr_leakage.tracking import Tracker

SETTINGS = [
    "partition=iid", "client.num_examples=1", "client.num_steps=1", "client.batch_size=1",
    "score=none", "what_if=null", "selection.every=1", "server.test_samples=10", "metric=pixel",
    "server.attack_later=true", "server.attack_chunk=1",
]  # fmt: skip


@dataclass(frozen=True)
class Units:
    """What a target costs.

    Attributes:
        kept_bytes: of its update on the disk.
        seconds: CPU seconds of the attacks that were measured.
        walk_seconds: CPU seconds of a shard beside its attacks, for each target of all shards.
        result_bytes: of its answer on the disk.
        merge_seconds: CPU seconds to check, read, measure and record its answer.
    """

    kept_bytes: float
    seconds: Sequence[float]
    walk_seconds: float
    result_bytes: float
    merge_seconds: float


QUICK = ("attack=idlg", "attack.optimizer.iterations=1")
"""In the place of the attack where all else of a target is measured, on more of them."""


SIZES = (2, 25)
"""Multiples of the clients: beside its attack a target costs what the larger run takes more.
Each run has costs of its own, such as imports."""


def measure(clients: int, overrides: Sequence[str], seed: int) -> Units:
    """Measure the attack on some targets, and all else between two runs that hardly attack."""
    seconds = _measure(clients, overrides, seed).seconds
    few, many = (_measure(n * clients, [*overrides, *QUICK], seed) for n in SIZES)

    def each(of_few: float, of_many: float) -> float:
        return (SIZES[1] * of_many - SIZES[0] * of_few) / (SIZES[1] - SIZES[0])

    return replace(
        many,
        seconds=seconds,
        walk_seconds=each(few.walk_seconds, many.walk_seconds),
        merge_seconds=each(few.merge_seconds, many.merge_seconds),
    )


def _measure(clients: int, overrides: Sequence[str], seed: int) -> Units:
    """Keep a small run, attack it in two shards, and merge them."""
    work = Path(tempfile.mkdtemp())
    try:
        wanted = [*SETTINGS, f"num_clients={clients}", "num_rounds=2", f"seed={seed}", *overrides]
        config = compose(wanted, str(work / "run"))
        server = make_server_app(lambda _: config, Console(quiet=True))
        run_inline(server, make_client_app(lambda _: build(config)), clients)
        targets = 2 * clients
        kept = sum(p.stat().st_size for p in (work / "run" / "kept").rglob("*.safetensors"))
        seconds: list[float] = []
        run = _timed(kept_run(work / "run", None), seconds)
        start = time.process_time()
        for index in (1, 2):
            attack_shard(run, Shard(index, 2))
        walks = time.process_time() - start - sum(seconds)
        files = list((work / "run" / "kept" / "shards").rglob("*.safetensors"))
        results = sum(p.stat().st_size for p in files)
        start = time.process_time()
        merge_shards(run)
        merged = time.process_time() - start
        return Units(
            kept / targets, seconds, walks / (2 * targets), results / targets, merged / targets
        )
    finally:
        shutil.rmtree(work)


class _Timed:
    """An attack that notes the CPU seconds of each call."""

    def __init__(self, attack: Attack, seconds: list[float]) -> None:
        self.attack, self.seconds = attack, seconds

    def __call__(self, job: AttackJob, progress: Any = None) -> list[Reconstruction]:
        """Attack."""
        start = time.process_time()
        found = self.attack(job, progress)
        self.seconds.append(time.process_time() - start)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the seconds, so that each call finds its answers under one name."""
        return _Timed, (self.attack, [])


def _timed(run: KeptRun, seconds: list[float]) -> KeptRun:
    """Return the run with an attack that notes its seconds."""

    def audit_of(tracker: Tracker) -> ServerAudit:
        audit = run.audit_of(tracker)
        assert audit.attack is not None
        audit.attack = _Timed(audit.attack, seconds)
        return audit

    return replace(run, audit_of=audit_of)


@dataclass(frozen=True)
class Federation:
    """What is attacked, and on what.

    Attributes:
        targets: updates in all rounds.
        machines: with as many cores each.
        cores: of a machine, each of which attacks one target at a time.
        hours_between_failures: of one machine, on average; 0 for none.
        restart_seconds: until a machine that failed attacks again.
    """

    targets: int
    machines: int
    cores: int
    hours_between_failures: float
    restart_seconds: float = 300.0


def simulate(units: Units, plan: Federation, shares: bool, draw: random.Random) -> float:
    """Return the hours until the last target is attacked.

    Args:
        units: the costs.
        plan: what is to be done.
        shares: whether each machine has a fixed share, as shards; else the next free core takes
            the next target, as on Ray.
        draw: of the targets' seconds and the failures.
    """
    rate = plan.hours_between_failures * 3600.0
    queues = [len(range(m, plan.targets, plan.machines)) for m in range(plan.machines)]
    left = plan.targets
    walk = units.walk_seconds * plan.targets if shares else 0.0
    free = [(walk, m, c) for m in range(plan.machines) for c in range(plan.cores)]
    heapq.heapify(free)
    fails = [draw.expovariate(1 / rate) if rate else float("inf") for _ in range(plan.machines)]
    end = 0.0
    while free:
        now, machine, core = heapq.heappop(free)
        if (queues[machine] if shares else left) == 0:
            continue
        done = now + draw.choice(units.seconds)
        if fails[machine] <= done:  # what this core is at is lost, and taken up again
            back = max(now, fails[machine]) + plan.restart_seconds
            if now <= fails[machine]:
                fails[machine] += draw.expovariate(1 / rate)
            heapq.heappush(free, (back, machine, core))
            continue
        queues[machine] -= 1
        left -= 1
        end = max(end, done)
        heapq.heappush(free, (done, machine, core))
    return end / 3600.0


def main() -> None:
    """Print the costs of a unit and the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--cores", type=int, default=8)
    parser.add_argument("--failures", type=float, default=24.0, help="hours between, by machine")
    parser.add_argument("--measured", type=int, default=8, help="clients of the small run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of the small run's config")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    units = measure(arguments.measured, arguments.overrides, arguments.seed)
    mean, most = sum(units.seconds) / len(units.seconds), max(units.seconds)
    print("| of a target | |\n|---|---|")
    print(f"| its update, kept | {units.kept_bytes / 1e3:.0f} kB |")
    print(f"| its attack | {mean:.2f} CPU s (at most {most:.2f}) |")
    print(f"| its place in each shard | {1e3 * units.walk_seconds:.0f} CPU ms |")
    print(f"| its answer, kept | {units.result_bytes / 1e3:.0f} kB |")
    print(f"| its merge | {1e3 * units.merge_seconds:.0f} CPU ms |")
    print("\n| attacked | targets | kept | shards | Ray | without failures | merge |")
    print("|---|---|---|---|---|---|---|")
    for every in (1, 10, 100):
        targets = arguments.clients * arguments.rounds // every
        hours = []
        for shares, failures in (
            (True, arguments.failures),
            (False, arguments.failures),
            (False, 0),
        ):
            plan = Federation(targets, arguments.machines, arguments.cores, failures)
            hours.append(simulate(units, plan, shares, random.Random(arguments.seed)))
        what = "all" if every == 1 else f"one in {every}"
        kept, merged = targets * units.kept_bytes / 1e9, targets * units.merge_seconds / 3600
        shown = " | ".join(f"{each:.2f} h" for each in hours)
        print(f"| {what} | {targets:,} | {kept:.1f} GB | {shown} | {merged:.2f} h |")


if __name__ == "__main__":
    main()
