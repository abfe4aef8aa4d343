"""Kills at random moments: is every record that was written still there, and can one report on it?

``python -m simulations.benchmarks.kills``: a tiny audit runs in a forked process, which tells
through a pipe that a line was written, and gets SIGKILL at a random moment. Afterwards every line
that was told of must be readable, at most one may be torn, and the report must be written.
"""

import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_leakage.flower import run_inline
from flwr_leakage.report import write_report
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from flwr_leakage.tracking import JsonlTracker, read_run
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from simulations.benchmarks import lab

OVERRIDES = [
    "num_clients=4",
    "num_rounds=200",
    "model=linear",
    "score=gradient_norm",
    "attack=idlg",
    "attack.optimizer.iterations=3",
    "partition=iid",
    "client.num_examples=2",
    "what_if=null",
    "server.test_samples=10",
]


def audit(folder: Path, pipe: Connection) -> None:
    """A run that tells of every line that it wrote; it is not meant to reach its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    append = JsonlTracker._append

    def told(self: JsonlTracker, row: dict[str, Any]) -> None:
        append(self, row)
        pipe.send_bytes(b".")

    JsonlTracker._append = told  # type: ignore[method-assign]
    config = compose(OVERRIDES, str(folder))
    server = make_server_app(lambda _: config, Console(quiet=True))
    run_inline(server, make_client_app(lambda _: build(config)), config["num_clients"])


def kill_once(folder: Path, seconds: float) -> int:
    """Kill a run ``seconds`` after its first line; return the number of lines it told of."""
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    process = forking.Process(target=audit, args=(folder, writer))
    process.start()
    writer.close()
    reader.poll(300)
    time.sleep(seconds)
    process.kill()
    process.join()
    told = 0
    try:
        while True:
            told += len(reader.recv_bytes())
    except EOFError:
        return told


def main() -> None:
    """Print a line for each kill and a summary."""
    parser = lab.command(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds after the first line")
    arguments = lab.start(parser)
    draws = random.Random(arguments.seed)
    lab.print_header("kill", "after, s", "told of", "readable", "torn", "report, kB")
    bad = 0
    for number in range(arguments.kills):
        seconds = draws.uniform(0, arguments.longest)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            told = kill_once(folder, seconds)
            lines = (folder / RECORDS_FILE).read_bytes().split(b"\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = read_run(folder)
                report = write_report(folder)
            torn = len(run.problems)
            readable = len([line for line in lines if line]) - torn
            bad += readable < told or torn > 1 or run.closed
            size = report.stat().st_size / 1000
        lab.print_row(number, f"{seconds:.2f}", told, readable, torn, f"{size:.0f}")
    print(f"\n{arguments.kills - bad} of {arguments.kills} kills lost nothing that was written.")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
