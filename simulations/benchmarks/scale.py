"""What the audit adds to a round of many clients, and whether its memory stays flat.

``python -m simulations.benchmarks.scale --clients 10 100``: a null training (each client sends back
what it was sent, plus noise) of LeNet on the in-process grid, without the audit and with one that
attacks nobody, in processes of their own. Times are CPU times of the one process, as
the machine may be shared, medians over the rounds; memory is what is resident after round 10 and
after the last. Lines are those of the records, and a second is one of the audited run. All clients'
own notes lie in this process: ``--keep-rounds 1`` bounds them, which leaves the server's memory.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.audit import ServerAudit
from flwr_leakage.flower import ClientAudit, HonestButCurious, InlineGrid, LeakageMod
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.tracking import JsonlTracker
from simulations.benchmarks import lab

SPEC = InputSpec((1, 28, 28), 10)
SCHEDULE = LocalSchedule(0.1)
EARLY = 10
"""The round after which memory is first looked at."""


def client_app(network: LeNet, audited: bool, keep_rounds: int | None) -> ClientApp:
    """Sends back what it got, plus noise; with the mod, as an audited client would."""
    app = ClientApp()
    plan = ScorePlan(keep_rounds=keep_rounds)
    audit = ClientAudit(GradientMap(network), SPEC, SCHEDULE, score_plan=plan)
    mods = [LeakageMod(audit)] if audited else []

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        draws = np.random.default_rng(int(context.node_id))
        sent = message.content.array_records["arrays"]
        arrays = {
            name: Array(value.numpy() + draws.standard_normal(value.shape, np.float32) * 1e-3)
            for name, value in sent.items()
        }
        metrics = MetricRecord({"num-examples": 1, "train-loss": 0.5})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def measure(
    num_clients: int, num_rounds: int, audited: bool, keep_rounds: int | None
) -> dict[str, float]:
    """Run once in this process."""
    network = LeNet((1, 28, 28), 10)
    ends: list[float] = []
    memory: list[float] = []

    def round_ended(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.process_time())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    with tempfile.TemporaryDirectory() as folder:
        tracker = JsonlTracker(f"{folder}/run")
        strategy = FedAvg(fraction_evaluate=0.0)
        audit = ServerAudit(GradientMap(network), SPEC, SCHEDULE, tracker)
        around = HonestButCurious(strategy, audit) if audited else strategy
        grid = InlineGrid(client_app(network, audited, keep_rounds), num_clients)
        first = ArrayRecord(network.state_dict())
        around.start(grid, first, num_rounds=num_rounds, evaluate_fn=round_ended)
        tracker.close()
        lines = (tracker.folder / "records.jsonl").read_bytes().count(b"\n")
    seconds = [after - before for before, after in pairwise(ends)]
    return {
        "round": statistics.median(seconds),
        "early": memory[min(EARLY, num_rounds)],
        "late": memory[-1],
        "lines": lines,
        "lines_per_second": lines / sum(seconds),
    }


def main() -> None:
    """Print the table; each run is made in a process of its own, by this same command."""
    parser = lab.command(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--keep-rounds", type=int, help="of a client's notes; all if not given")
    parser.add_argument("--one", choices=["plain", "audited"], help="one run, printed as JSON")
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if arguments.one:
        run = measure(
            arguments.clients[0], arguments.rounds, arguments.one == "audited",
            arguments.keep_rounds,
        )  # fmt: skip
        print("\n" + json.dumps(run))
        return
    lab.print_header(
        "clients", "round, ms", "with audit, ms", "added a client, ms", "memory, MB: plain",
        f"audited: round {EARLY}", "audited: end", "lines", "lines a second",
    )  # fmt: skip
    for count in arguments.clients:
        runs = {}
        for kind in ("plain", "audited"):
            command = [sys.executable, "-m", "simulations.benchmarks.scale", "--one", kind]
            command += ["--clients", str(count), "--rounds", str(arguments.rounds)]
            if arguments.keep_rounds is not None:
                command += ["--keep-rounds", str(arguments.keep_rounds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[kind] = json.loads(done.stdout.splitlines()[-1])
        plain, audited = runs["plain"], runs["audited"]
        added = (audited["round"] - plain["round"]) / count
        lab.print_row(
            count, f"{1000 * plain['round']:.0f}", f"{1000 * audited['round']:.0f}",
            f"{1000 * added:.2f}", f"{plain['late']:.0f}", f"{audited['early']:.0f}",
            f"{audited['late']:.0f}", audited["lines"],
            f"{audited['lines_per_second']:.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
