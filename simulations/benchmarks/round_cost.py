"""What the audit adds to a round of clients that train, without attacks and scores.

``python -m simulations.benchmarks.round_cost --samples 320 --repetitions 15``: LeNet clients on
embedded MNIST, mini-batches of 32, on the in-process grid. The kinds of audit run in turns, in an
order that is drawn anew each time, in one process. Times are CPU times of a round, which hold
training, Flower's strategy, its wire format and the audit's part of both sides; given are the
median, the median and the quartiles of the ratio to the plain round of the same turn, and the ratio
of the fastest rounds, which another process disturbs least.
"""

import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import FedAvg, Strategy
from torch.nn import functional as F

from flwr_leakage.audit import ServerAudit
from flwr_leakage.data import embedded_mnist
from flwr_leakage.flower import ClientAudit, HonestButCurious, InlineGrid, LeakageMod, observe
from flwr_leakage.flower import audit as audit_app
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet
from flwr_leakage.records import Batch, InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker
from simulations.benchmarks import lab

SPEC = InputSpec((1, 28, 28), 10)
NUM_CLIENTS, BATCH_SIZE, NUM_ROUNDS = 2, 32, 3


def network() -> LeNet:
    """The model of every client."""
    torch.manual_seed(0)
    return LeNet((1, 28, 28), 10)


def client_app(samples: Batch, app: ClientApp, mods: list[Mod]) -> ClientApp:
    """An ordinary epoch of SGD on the samples."""

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = torch.randperm(len(samples))
        for places in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            logits = model(samples.inputs[places])
            F.cross_entropy(logits, samples.targets[places]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(samples)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


Apps = tuple[Strategy, ClientApp]


def kinds(samples: Batch) -> dict[str, Callable[[Path], Apps]]:
    """By name, how strategy and app are made for a run folder."""

    def strategy() -> Strategy:
        return FedAvg(fraction_evaluate=0.0)

    def plain(folder: Path) -> Apps:
        return strategy(), client_app(samples, ClientApp(), [])

    def observer(folder: Path) -> Apps:
        return watched(folder), client_app(samples, ClientApp(), [])

    def watched(folder: Path) -> HonestButCurious:
        audit = ServerAudit(GradientMap(network()), SPEC, schedule, JsonlTracker(folder))
        return HonestButCurious(strategy(), audit)

    def by_hand(folder: Path) -> Apps:
        mod = LeakageMod(ClientAudit(GradientMap(network()), SPEC, schedule))
        return watched(folder), client_app(samples, ClientApp(), [mod])

    def one_line(replay_every: int | None) -> Callable[[Path], Apps]:
        def make(folder: Path) -> Apps:
            app = audit_app(client_app(samples, ClientApp(), []), replay_every=replay_every)
            return observe(strategy(), network(), folder, attack=None), app

        return make

    schedule = LocalSchedule(0.1, len(samples) // BATCH_SIZE, BATCH_SIZE)
    return {
        "plain": plain,
        "observer on the server": observer,
        "observer and LeakageMod": by_hand,
        "observe and audit, replay_every=None": one_line(None),
        "observe and audit, a replay each round": one_line(1),
    }


def round_seconds(make: Callable[[Path], Apps]) -> float:
    """CPU seconds of a round, the mean of those after the first."""
    ends: list[float] = []

    def ended(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        strategy, app = make(Path(folder) / "run")
        grid = InlineGrid(app, NUM_CLIENTS)
        first = ArrayRecord(network().state_dict())
        strategy.start(grid, first, num_rounds=NUM_ROUNDS, evaluate_fn=ended)
    return statistics.mean(after - before for before, after in list(pairwise(ends))[1:])


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[320])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seed", type=int, default=100)
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    draws = random.Random(arguments.seed)
    digits, _ = embedded_mnist()
    lab.print_header(
        "samples a client", "audit", "round, ms", "added, %", "quartiles, %", "of the fastest, %"
    )
    for count in arguments.samples:
        made = kinds(digits.batch(range(count)))
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(arguments.repetitions):
            for name in draws.sample(list(made), len(made)):
                seconds[name].append(round_seconds(made[name]))
        for name, taken in seconds.items():
            ratios = zip(taken, seconds["plain"], strict=True)
            added = sorted(100 * (own / plain - 1) for own, plain in ratios)
            low, median, high = statistics.quantiles(added, n=4)
            lab.print_row(
                count, name, f"{1000 * statistics.median(taken):.0f}", f"{median:.1f}",
                f"{low:.1f} … {high:.1f}", f"{100 * (min(taken) / min(seconds['plain']) - 1):.1f}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
