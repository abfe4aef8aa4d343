"""What the audit adds to a round of clients that train, without attacks and scores.

``python -m simulations.benchmarks.round_cost --clients 320x32 --repetitions 15``: LeNet clients
with so many digits of embedded MNIST, in mini-batches of that size, on the in-process grid. In each
repetition every kind of audit runs 11 rounds in one process, in an order that is drawn anew. Times
are CPU times of a round, which hold training, Flower's strategy, its wire format and the audit's
part of both sides. Of a repetition the median of its rounds 2 to 10 counts, in which ``audit``
replays nothing; or that of the two rounds with a replay. Given are medians over the repetitions,
and the quartiles of the ratio to the plain rounds of the same repetition.
"""

import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise
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
NUM_CLIENTS, NUM_ROUNDS = 2, 11
QUIET, REPLAYED = slice(1, 10), slice(None, None, 10)
"""Rounds without and with a replay, by the default of ``audit``."""


def network() -> LeNet:
    """The model of every client."""
    torch.manual_seed(0)
    return LeNet((1, 28, 28), 10)


def client_app(samples: Batch, batch_size: int, app: ClientApp, mods: list[Mod]) -> ClientApp:
    """An ordinary epoch of SGD on the samples."""

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        model = network()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = torch.randperm(len(samples))
        for places in order.split(batch_size):
            optimizer.zero_grad()
            logits = model(samples.inputs[places])
            F.cross_entropy(logits, samples.targets[places]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(samples)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


Apps = tuple[Strategy, ClientApp]


def kinds(samples: Batch, batch_size: int) -> dict[str, Callable[[Path], Apps]]:
    """By name, how strategy and app are made for a run folder."""

    def app(around: Callable[[ClientApp], ClientApp], mods: list[Mod]) -> ClientApp:
        return client_app(samples, batch_size, around(ClientApp()), mods)

    def strategy() -> Strategy:
        return FedAvg(fraction_evaluate=0.0)

    def plain(folder: Path) -> Apps:
        return strategy(), app(lambda own: own, [])

    def observer(folder: Path) -> Apps:
        return observe(strategy(), network(), folder, attack=None), app(lambda own: own, [])

    def by_hand(folder: Path) -> Apps:
        audit = ServerAudit(GradientMap(network()), SPEC, schedule, JsonlTracker(folder))
        mod = LeakageMod(ClientAudit(GradientMap(network()), SPEC, schedule))
        return HonestButCurious(strategy(), audit), app(lambda own: own, [mod])

    def one_line(folder: Path) -> Apps:
        return observe(strategy(), network(), folder, attack=None), app(audit_app, [])

    schedule = LocalSchedule(0.1, -(-len(samples) // batch_size), batch_size)
    return {
        "none": plain,
        "observe": observer,
        "HonestButCurious and LeakageMod": by_hand,
        "observe and audit": one_line,
    }


def round_seconds(make: Callable[[Path], Apps]) -> list[float]:
    """CPU seconds of each round."""
    ends: list[float] = []

    def ended(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        strategy, app = make(Path(folder) / "run")
        grid = InlineGrid(app, NUM_CLIENTS)
        first = ArrayRecord(network().state_dict())
        strategy.start(grid, first, num_rounds=NUM_ROUNDS, evaluate_fn=ended)
    return [after - before for before, after in pairwise(ends)]


def print_kind(client: str, name: str, own: list[float], plain: list[float]) -> None:
    """One line: seconds of a round by repetition, beside those without an audit."""
    added = sorted(100 * (mine / theirs - 1) for mine, theirs in zip(own, plain, strict=True))
    low, median, high = statistics.quantiles(added, n=4)
    each = 1000 / NUM_CLIENTS
    more = statistics.median([m - t for m, t in zip(own, plain, strict=True)])
    lab.print_row(
        client, name, f"{each * statistics.median(own):.1f}", f"{each * more:.2f}",
        f"{median:.1f}", f"{low:.1f} … {high:.1f}",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--clients", nargs="+", default=["320x32"], metavar="SAMPLESxBATCH")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seed", type=int, default=100)
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    draws = random.Random(arguments.seed)
    digits, _ = embedded_mnist()
    lab.print_header(
        "samples x batch", "audit", "ms a client", "added, ms", "added, %", "quartiles, %"
    )
    for client in arguments.clients:
        count, batch_size = map(int, client.split("x"))
        samples = digits.batch(list(islice(cycle(range(len(digits))), count)))
        made = kinds(samples, batch_size)
        seconds: dict[str, list[list[float]]] = {name: [] for name in made}
        for _ in range(arguments.repetitions):
            for name in draws.sample(list(made), len(made)):
                seconds[name].append(round_seconds(made[name]))
        quiet = {
            name: [statistics.median(rounds[QUIET]) for rounds in runs]
            for name, runs in seconds.items()
        }
        for name, taken in quiet.items():
            print_kind(client, name, taken, quiet["none"])
        replayed = [statistics.mean(rounds[REPLAYED]) for rounds in seconds["observe and audit"]]
        print_kind(client, "observe and audit, with a replay", replayed, quiet["none"])


if __name__ == "__main__":
    main()
