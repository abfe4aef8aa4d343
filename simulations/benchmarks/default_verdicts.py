"""Compare what one line says of a client with what the same attack reads in five times the time.

    python -m simulations.benchmarks.default_verdicts --root FOLDER --output rows.jsonl

``FOLDER`` holds CIFAR-10's images. For each of four networks and 1, 4 and
32 images, a Flower app of one client takes one step of SGD under untrained weights. The client is
given to ``audit`` and the strategy to ``observe``, with the truth of a simulation and nothing else:
the column *default*. The column *long* is the same training with ``max_seconds`` = ``--seconds``
and no other limit. A cell has the worst grade, the numbers of images by grade, the mean PSNR in dB
and the CPU seconds of the attack. Images begin at ``--first``; weights are of ``--seed``.

A row is appended to ``--output`` as soon as it is known; rows that are there are not run again.
One thread a process.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from flwr_leakage.flower import audit, observe, run_inline
from flwr_leakage.records import Batch
from flwr_leakage.report.attempts import attempts, tally
from flwr_leakage.report.grades import GRADES
from flwr_leakage.report.index import Index
from flwr_leakage.report.verdict import judge as verdict
from flwr_leakage.tracking import read_run
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_portfolio import read_rows
from simulations.benchmarks.portfolio_cases import NETWORKS, SPECS, load

SPEC = SPECS["cifar10"]
CLIENTS = [(name, n) for name in ("quickstart", "lenet", "relu", "mlp") for n in (1, 4, 32)]
LONG = {"max_round_seconds": None, "max_bytes": None}


def run_app(network: nn.Module, pixels: Batch, folder: Path, **settings: Any) -> None:
    """Train for one round of one step on a client that is audited, with an observed server."""
    images, labels = SPEC.normalize(pixels.inputs), pixels.targets
    app, server = ClientApp(), ServerApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = network
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        told = MetricRecord({"num-examples": len(labels)})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": told}
        return Message(RecordDict(content), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        watched = observe(strategy, network, folder, truth=folder.parent / "truth", **settings)
        watched.start(grid, ArrayRecord(network.state_dict()), num_rounds=1)

    run_inline(server, audit(app, truth=folder.parent / "truth"), num_clients=1)


def judge(name: str, count: int, column: str, given: argparse.Namespace) -> None:
    """Run one client in one column, and append a row."""
    key = {"network": name, "images": count, "column": column,
           "seed": given.seed, "first": given.first}  # fmt: skip
    if any(all(row[k] == v for k, v in key.items()) for row in read_rows(given.output)):
        return
    torch.manual_seed(given.seed)
    network = NETWORKS[name](SPEC.shape)
    pixels = load(given.root, given.split, given.first, count)
    settings = {} if column == "default" else {"max_seconds": given.seconds, **LONG}
    with tempfile.TemporaryDirectory() as place, lab.Stopwatch() as watch:
        run_app(network, pixels, Path(place) / "run", **settings)
        run = read_run(Path(place) / "run")
        found = attempts(Index(run.records))
        sentence = verdict(Index(run.records), run.events, run.metadata).sentence
    grades = tally(found)
    row = {
        **key,
        "grades": {grade: grades[grade] for grade in GRADES},
        "psnr": sum(each.psnr or 0.0 for each in found) / max(1, len(found)),
        "seconds": watch.seconds,
        "sentence": sentence,
    }
    with given.output.open("a") as file:
        file.write(json.dumps(row) + "\n")


def cell(row: dict[str, Any]) -> str:
    """Return the worst grade, the number of images in each grade, dB and CPU seconds."""
    counts = " / ".join(str(row["grades"][grade]) for grade in GRADES)
    worst = next((grade for grade in GRADES if row["grades"][grade]), "no image")
    return f"{worst} ({counts}), {row['psnr']:.1f} dB, {row['seconds']:.0f} s"


def main() -> None:
    """Run the command."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.set_defaults(seed=300)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--columns", nargs="+", default=["default", "long"])
    parser.add_argument("--first", type=int, default=600)
    given = lab.start(parser)
    for column in given.columns:
        for name, count in CLIENTS:
            judge(name, count, column, given)
    rows = {(r["network"], r["images"], r["column"]): r for r in read_rows(given.output)}
    lab.print_header("client", "default: worst (exact / recognisable / partly / nothing)", "long")
    for name, count in CLIENTS:
        pair = [rows[name, count, column] for column in given.columns]
        lab.print_row(f"{name}, {count}", *map(cell, pair))


if __name__ == "__main__":
    main()
