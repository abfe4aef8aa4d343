"""What the audit adds to a round of clients that train, without attacks and scores.

``python -m simulations.benchmarks.round_cost --clients 320x32 --rounds 100``: LeNet clients with so
many digits of embedded MNIST, in mini-batches of that size, on the in-process grid. In each round
every kind of audit has its turn, in an order that is drawn anew, in one process. Times are CPU
times of a round, which hold training, Flower's strategy, its wire format and the audit's part of
both sides. Given are medians of a client's share, of the difference to the plain round of the same
turn (with its 95 % interval, by 2,000 resamples of the rounds), and that as a share of a plain
round; and the quotient of the lowest deciles, of rounds that other processes disturbed least. The
first rounds are left out.
"""

import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.flower import InlineGrid, observe
from flwr_leakage.flower import audit as audit_app
from flwr_leakage.models import LeNet
from flwr_leakage.records import Batch
from simulations.benchmarks import lab

NUM_CLIENTS = 10
PLAIN, REPLAYED = "none", "observe and audit, a replay each round"
WARM = 2
"""Rounds that do not count."""


def network() -> LeNet:
    """The model of every client."""
    torch.manual_seed(0)
    return LeNet((1, 28, 28), 10)


def client_app(samples: Batch, batch_size: int, app: ClientApp) -> ClientApp:
    """An ordinary epoch of SGD on the samples."""

    @app.train()
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

    def app(around: Callable[[ClientApp], ClientApp] = lambda own: own) -> ClientApp:
        return client_app(samples, batch_size, around(ClientApp()))

    def strategy() -> Strategy:
        return FedAvg(fraction_evaluate=0.0)

    def plain(folder: Path) -> Apps:
        return strategy(), app()

    def observer(folder: Path) -> Apps:
        return observe(strategy(), network(), folder, attack=None), app()

    def one_line(replay_every: int | None) -> Callable[[Path], Apps]:
        def make(folder: Path) -> Apps:
            own = app(lambda own: audit_app(own, replay_every=replay_every))
            return observe(strategy(), network(), folder, attack=None), own

        return make

    return {
        PLAIN: plain,
        "observe": observer,
        "observe and audit, between replays": one_line(10**6),
        REPLAYED: one_line(1),
    }


class Federation:
    """A strategy and its clients, a round at a time."""

    def __init__(self, apps: Apps) -> None:
        self._strategy, app = apps
        self._grid = InlineGrid(app, NUM_CLIENTS)
        self._arrays = ArrayRecord(network().state_dict())

    def seconds(self, server_round: int) -> float:
        """CPU seconds of the next round."""
        start = time.process_time()
        messages = self._strategy.configure_train(
            server_round, self._arrays, ConfigRecord(), self._grid
        )
        replies = self._grid.send_and_receive(list(messages))
        arrays, _ = self._strategy.aggregate_train(server_round, replies)
        taken = time.process_time() - start
        if arrays is not None:
            self._arrays = arrays
        return taken


def _fast(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=10)[0]


def print_kind(client: str, name: str, own: list[float], plain: list[float]) -> None:
    """One line: milliseconds of a client by round, beside those without an audit."""
    more = [mine - theirs for mine, theirs in zip(own, plain, strict=True)]
    usual = statistics.median(plain)
    draws = random.Random(0)
    again = sorted(statistics.median(draws.choices(more, k=len(more))) for _ in range(2000))
    low, high = again[50], again[-51]
    lab.print_row(
        client, name, len(own), f"{statistics.median(own):.1f}",
        f"{statistics.median(more):.2f} ({low:.2f} to {high:.2f})",
        f"{100 * statistics.median(more) / usual:.1f} ({100 * low / usual:.1f} to "
        f"{100 * high / usual:.1f})",
        f"{100 * (_fast(own) / _fast(plain) - 1):.1f}",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--clients", nargs="+", default=["320x32"], metavar="SAMPLESxBATCH")
    parser.add_argument("--rounds", type=int, nargs="+", default=[100], help="for each client")
    parser.add_argument("--without-replays", action="store_true", help="leave out the last kind")
    parser.add_argument("--seed", type=int, default=100)
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    draws = random.Random(arguments.seed)
    digits, _ = embedded_mnist()
    lab.print_header(
        "samples x batch", "audit", "rounds", "ms a client", "added, ms", "added, %",
        "of the fastest tenth, %",
    )  # fmt: skip
    for client, rounds in zip(arguments.clients, cycle(arguments.rounds), strict=False):
        count, batch_size = map(int, client.split("x"))
        samples = digits.batch(list(islice(cycle(range(len(digits))), count)))
        with tempfile.TemporaryDirectory() as folder:
            federations = {
                name: Federation(make(Path(folder) / name))
                for name, make in kinds(samples, batch_size).items()
                if not (arguments.without_replays and name == REPLAYED)
            }
            taken: dict[str, list[float]] = {name: [] for name in federations}
            for server_round in range(1, rounds + WARM + 1):
                for name in draws.sample(list(federations), len(federations)):
                    seconds = federations[name].seconds(server_round)
                    if server_round > WARM:
                        taken[name].append(1000 * seconds / NUM_CLIENTS)
        for name, own in taken.items():
            print_kind(client, name, own, taken[PLAIN])


if __name__ == "__main__":
    main()
