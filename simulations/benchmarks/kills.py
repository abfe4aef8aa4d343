"""Kills at random moments: is every record that was written still there, and can one report on it?

``python -m simulations.benchmarks.kills``: a tiny audit runs in a process of its own, which writes
the number of lines of its record to a pipe after each one, and gets SIGKILL at a random moment.
Afterwards every line that was acknowledged must be readable, at most one line may be torn, and the
report must be written.
"""

import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from flwr_leakage.report import write_report
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from simulations.benchmarks import lab

PROGRAM = """
import os, sys
from rich.console import Console
from flwr_leakage.flower import run_inline
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from flwr_leakage.tracking import jsonl

folder, pipe, lines = sys.argv[1], int(sys.argv[2]), 0
append = jsonl.JsonlTracker._append

def acknowledged(self, row):
    global lines
    append(self, row)
    lines += 1
    os.write(pipe, f"{lines}\\n".encode())

jsonl.JsonlTracker._append = acknowledged
overrides = ["num_clients=4", "num_rounds=200", "model=linear", "score=gradient_norm",
             "attack.optimizer.iterations=3", "server.test_samples=10"]
config = compose(overrides, folder)
run_inline(make_server_app(lambda _: config, Console(quiet=True)),
           make_client_app(lambda _: build(config)), config["num_clients"])
"""


def kill_once(folder: Path, seconds: float) -> tuple[int, float]:
    """Kill a run ``seconds`` after its first line; the lines acknowledged, and its whole time."""
    reader, writer = os.pipe()
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(writer)], pass_fds=[writer]
    )
    os.close(writer)
    select.select([reader], [], [], 300)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with os.fdopen(reader) as pipe:
        said = [line for line in pipe if line.endswith("\n")]
    return int(said[-1]) if said else 0, time.monotonic() - start


def main() -> None:
    """Print a line for each kill and a summary."""
    parser = lab.command(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds after the first line")
    arguments = lab.start(parser)
    draws = random.Random(arguments.seed)
    lab.print_header("kill", "after, s", "acknowledged", "readable", "torn", "report, kB")
    bad = 0
    for number in range(arguments.kills):
        seconds = draws.uniform(0, arguments.longest)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            acknowledged, _ = kill_once(folder, seconds)
            lines = (folder / RECORDS_FILE).read_bytes().split(b"\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = read_run(folder)
                report = write_report(folder)
            torn = len(run.problems)
            readable = len([line for line in lines if line]) - torn
            bad += readable < acknowledged or torn > 1 or run.closed
            size = report.stat().st_size / 1000
        lab.print_row(number, f"{seconds:.2f}", acknowledged, readable, torn, f"{size:.0f}")
    print(f"\n{arguments.kills - bad} of {arguments.kills} kills lost nothing that was written.")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
