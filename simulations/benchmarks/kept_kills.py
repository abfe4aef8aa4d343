"""Attacks of kept updates, killed at random moments: what is recorded equals an uninterrupted run.

    python -m simulations.benchmarks.kept_kills --kills 30 --seed 100

Each child process is ended by SIGKILL after a random share of the time that the whole attack took,
and started again, until one ends by itself; this goes on until there were so many kills.
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from rich.console import Console

from flwr_leakage.flower import run_inline
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from flwr_leakage.simulation.later import attack_kept_of_run
from flwr_leakage.tracking import read_run

SETTINGS = [
    "num_clients=3", "num_rounds=2", "partition=iid", "client.num_examples=1", "client.num_steps=1",
    "client.batch_size=1", "model=lenet_tanh", "score=none", "attack=idlg",
    "attack.optimizer.iterations=10", "what_if=null", "selection.every=1", "server.test_samples=10",
    "server.attack_max_seconds=null", "server.attack_later=true", "server.attack_chunk=1",
]  # fmt: skip


def results(folder: Path) -> list[str]:
    """All numbers but times, and the names of the images."""
    run = read_run(folder)
    rows = [
        json.dumps([r.server_round, r.client_id, r.sample, r.kind, r.name, r.value, r.note])
        for r in run.records
        if r.kind != "cost"
    ]
    return sorted([*rows, *(image.path.name for image in run.images)])


def attacked(folder: Path, seconds: float | None) -> bool:
    """Attack in a child that is killed after some time; whether it ended by itself."""
    child = os.fork()
    if not child:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            attack_kept_of_run(folder, 1, None)
            os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def main() -> None:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=100)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    work = Path(tempfile.mkdtemp())
    config = compose([*SETTINGS, f"seed={arguments.seed}"], str(work / "kept"))
    server = make_server_app(lambda _: config, Console(quiet=True))
    run_inline(server, make_client_app(lambda _: build(config)), 3)
    shutil.copytree(work / "kept", work / "whole")
    start = time.monotonic()
    attacked(work / "whole", None)
    whole, expected = time.monotonic() - start, results(work / "whole")
    kills = runs = equal = torn = 0
    while kills < arguments.kills:
        folder = work / f"run{runs}"
        shutil.copytree(work / "kept", folder)
        while not attacked(folder, draw.uniform(0, whole) if kills < arguments.kills else None):
            kills += 1
        runs += 1
        found = read_run(folder)
        equal += results(folder) == expected
        torn += len(found.problems)
    print(f"{kills} kills in {runs} attacks of {whole:.1f} s, {len(expected)} numbers and images: ")
    print(f"{equal} of {runs} equal the uninterrupted one; {torn} torn lines left out")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
