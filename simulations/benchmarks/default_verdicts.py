"""Compare what one line says of a client with what the same attack reads in five times the time.

    python -m simulations.benchmarks.default_verdicts --root FOLDER --output rows.jsonl

``FOLDER`` holds CIFAR-10's images. For each of four networks and 1, 4 and
32 images, a Flower app of one client takes one step of SGD under untrained weights. The client is
given to ``audit`` and the strategy to ``observe``, with the truth of a simulation and nothing else:
the column *default*. The column *long* is the same training with ``max_seconds`` = ``--seconds``
and no other limit. A cell has the worst grade, the numbers of images by grade, the mean PSNR in dB
and the CPU seconds of the attack. Images begin at ``--first``; weights are of ``--seed``.

    python -m simulations.benchmarks.default_verdicts --root FOLDER --output rows.jsonl --others

attacks one image of each of twelve networks of other authors by plain ``observe``: torchvision's
with ten classes, in eval mode, and those that federated studies train (FedAvg's network of two
convolutions, LEAF's, McMahan's for CIFAR-10, FedAvg's MLP of 200 units). The table has the
verdict's sentence and its details.

A row is appended to ``--output`` as soon as it is known; rows that are there are not run again.
One thread a process.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
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

# isort: split
from torchvision import models

SPEC = SPECS["cifar10"]
CLIENTS = [(name, n) for name in ("quickstart", "lenet", "relu", "mlp") for n in (1, 4, 32)]


def _two_convolutions(channels: tuple[int, int], hidden: tuple[int, ...]) -> nn.Module:
    """Two 5 × 5 convolutions with max pooling, and a head, as in FedAvg's and LEAF's studies."""
    sizes = [channels[1] * 64, *hidden]
    head: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        head += [nn.Linear(inputs, outputs), nn.ReLU()]
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(3, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        *head, nn.Linear(sizes[-1], lab.CLASSES),
    )  # fmt: skip


def _two_hidden_layers() -> nn.Module:
    widths = (3072, 200, 200)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(200, lab.CLASSES))


TORCHVISION = (
    "resnet18", "vgg11_bn", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small",
    "efficientnet_b0", "shufflenet_v2_x1_0", "densenet121",
)  # fmt: skip

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "FedAvg's two convolutions": lambda: _two_convolutions((32, 64), (512,)),
    "LEAF's": lambda: _two_convolutions((32, 64), (2048,)),
    "McMahan's for CIFAR-10": lambda: _two_convolutions((64, 64), (384, 192)),
    "FedAvg's MLP": _two_hidden_layers,
    **{name: partial(models.get_model, name, num_classes=lab.CLASSES) for name in TORCHVISION},
}
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
    network = OTHERS[name]().eval() if name in OTHERS else NETWORKS[name](SPEC.shape)
    pixels = load(given.root, given.split, given.first, count)
    settings = {} if column == "default" else {"max_seconds": given.seconds, **LONG}
    with tempfile.TemporaryDirectory() as place, lab.Stopwatch() as watch:
        run_app(network, pixels, Path(place) / "run", **settings)
        run = read_run(Path(place) / "run")
        found = attempts(Index(run.records))
        judged = verdict(Index(run.records), run.events, run.metadata)
    grades = tally(found)
    row = {
        **key,
        "grades": {grade: grades[grade] for grade in GRADES},
        "psnr": sum(each.psnr or 0.0 for each in found) / max(1, len(found)),
        "seconds": watch.seconds,
        "sentence": judged.sentence,
        "details": [*judged.head, *judged.details],
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
    parser.add_argument("--others", action="store_true", help="networks of other authors")
    given = lab.start(parser)
    if given.others:
        lab.print_header("network, one image", "default", "verdict", "details")
        for name in OTHERS:
            judge(name, 1, "default", given)
            row = next(r for r in read_rows(given.output) if r["network"] == name)
            lab.print_row(name, cell(row), row["sentence"], " ".join(row["details"]))
        return
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
