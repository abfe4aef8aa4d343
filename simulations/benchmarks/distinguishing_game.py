"""Does what an audit sends beside an update help a server to tell two candidate batches apart?

``python -m simulations.benchmarks.distinguishing_game --root DATA --first 100 --trials 300``: a
server knows two batches of eight CIFAR-10 images that differ in one record, the network and the
settings of the noise. A client trains one step of SGD on one of them, drawn by a coin, under
``app = audit(app)`` and a mechanism. The server guesses which one it was: from the update alone, by
the likelihood ratio, which is the best test there is; and from the record beside it. To read a
record, the server runs the client itself on each candidate, makes the mechanism release the update
that it observed, and looks which record is nearer to the one that came. Where both are equally
near, it tosses a coin ("record") or takes the guess from the update ("both").

Each trial has its own images and weights. The shares are given with Wilson's 95 % interval. The
rows of Opacus need ``opacus``.
"""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.defenses import Chain, Clipping, GaussianNoise
from flwr_leakage.flower import InlineGrid, audit, run_inline
from flwr_leakage.flower.wire import RECORD_KEY
from flwr_leakage.records import Batch
from simulations.benchmarks import lab

SIZE, CLIP, DELTA, RATE = 8, 1.0, 1e-5, 1.0
EPSILONS = (0.1, 1.0, 10.0)
FRESH = ("train-cpu-seconds", "score-cpu-seconds", "replay-cpu-seconds")
"""Fields that no run repeats."""


def sigma(epsilon: float) -> float:
    """Flower's ``LocalDpMod``: the standard deviation of its noise at a sensitivity of 1."""
    return math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon


def network(seed: int) -> nn.Sequential:
    """A small ConvNet with weights of its own in each trial."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, 2), nn.ReLU(), nn.Conv2d(6, 8, 5, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 25, 10),
    )  # fmt: skip


def vector(state: Mapping[str, Tensor]) -> Tensor:
    """A state as one vector in double precision."""
    return torch.cat([value.double().flatten() for value in state.values()])


@dataclass
class Released:
    """What the server sees of one client.

    Attributes:
        update: that was released.
        note: the record beside it.
    """

    update: Tensor
    note: dict[str, Any]


def trained(model: nn.Module, batch: Batch) -> nn.Module:
    """One step of SGD on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.zero_grad()
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    optimizer.step()
    return model


def client(seed: int, batch: Batch, train: Callable[..., nn.Module], mods: list[Any]) -> ClientApp:
    """An ordinary app, which knows nothing of the audit."""
    app = ClientApp()

    @app.train(mods=mods)
    def work(message: Message, context: Context) -> Message:
        model = network(seed)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        state = ArrayRecord(train(model, batch).state_dict())
        metrics = MetricRecord({"num-examples": SIZE})
        return Message(RecordDict({"arrays": state, "metrics": metrics}), reply_to=message)

    return app


def play(seed: int, app: ClientApp) -> Released:
    """Ask a client for one round."""
    start = network(seed).state_dict()
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    config = ConfigRecord({"server-round": 1, "clipping_norm": CLIP})
    content = RecordDict({"arrays": ArrayRecord(start), "config": config})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    sent = reply.content.array_records["arrays"].to_torch_state_dict()
    record = reply.content.config_records[RECORD_KEY]
    return Released(vector(sent) - vector(start), read(str(record["note"])))


def read(text: str) -> dict[str, Any]:
    """All fields of a record but those of time."""
    note = json.loads(text)
    for part in ("replay", "training"):
        if note.get(part):
            note[part] = json.loads(note[part])
    return {name: value for name, value in note.items() if name not in FRESH}


def forge(seed: int, update: Tensor) -> Callable[[Message, Context, Any], Message]:
    """A mod that answers with an observed update in the place of a mechanism's own."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        start = network(seed).state_dict()
        parts = update.split([value.numel() for value in start.values()])
        reply.content["arrays"] = ArrayRecord(
            {
                name: (value.double() + part.reshape(value.shape)).to(value.dtype)
                for (name, value), part in zip(start.items(), parts, strict=True)
            }
        )
        return reply

    return mod


# The mechanisms


class Mechanism(ABC):
    """What happens to an update between the training and the wire.

    Args:
        epsilon: ε of the mechanism at δ = 1e-5; 0 for clipping without noise.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    @abstractmethod
    def release(self, seed: int, batch: Batch) -> Released:
        """Run the client on its batch."""

    @abstractmethod
    def imagine(self, seed: int, batch: Batch, observed: Released) -> dict[str, Any]:
        """Return the record of a client with this batch that releases what was observed."""

    def clean(self, seed: int, batch: Batch) -> Tensor:
        """Return the update of a batch before noise, clipped to ``CLIP``."""
        start = vector(network(seed).state_dict())
        update = vector(trained(network(seed), batch).state_dict()) - start
        return update * min(1.0, CLIP / float(update.norm()))


class LocalDp(Mechanism):
    """Flower's own mod in front of the app."""

    def _mods(self) -> list[Any]:
        return [LocalDpMod(CLIP, 1.0, self.epsilon, DELTA)]

    def release(self, seed: int, batch: Batch) -> Released:
        """Run the client on its batch."""
        return play(seed, audit(client(seed, batch, trained, self._mods())))

    def imagine(self, seed: int, batch: Batch, observed: Released) -> dict[str, Any]:
        """Return the record of a client with this batch that releases what was observed."""
        mods = [forge(seed, observed.update)]
        return play(seed, audit(client(seed, batch, trained, mods))).note


class ClippingAlone(LocalDp):
    """Flower's fixed clipping without noise: the update alone already tells everything."""

    def _mods(self) -> list[Any]:
        return [fixedclipping_mod]


class OwnNoise(Mechanism):
    """Clipping and noise of this package, as the audit's defense."""

    def release(self, seed: int, batch: Batch) -> Released:
        """Run the client on its batch."""
        noise = GaussianNoise(sigma(self.epsilon), relative_to="update")
        defense = Chain([Clipping(CLIP, relative_to="update"), noise])
        return play(seed, audit(client(seed, batch, trained, []), defense=defense))

    def imagine(self, seed: int, batch: Batch, observed: Released) -> dict[str, Any]:
        """Return the record of a client with this batch that releases what was observed."""
        return self.release(seed, batch).note  # its record does not depend on the noise


class Opacus(Mechanism):
    """DP-SGD by Opacus: each sample's gradient is clipped, and noise enters the step."""

    def _train(self, noise: Tensor | None = None, multiplier: float = 0.0) -> Callable[..., Any]:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        def train(model: nn.Module, batch: Batch) -> nn.Module:
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            private, optimizer, loader = PrivacyEngine().make_private(
                module=model, optimizer=optimizer, noise_multiplier=multiplier,
                data_loader=DataLoader(TensorDataset(batch.inputs, batch.targets), SIZE),
                max_grad_norm=CLIP, poisson_sampling=False,
            )  # fmt: skip
            if noise is not None:
                _answer(optimizer, noise)
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(private(inputs), targets).backward()
                optimizer.step()
            return model

        return train

    def release(self, seed: int, batch: Batch) -> Released:
        """Run the client on its batch."""
        # A batch of eight, sensitivity CLIP: the noise of the sum is sigma(ε)·CLIP.
        train = self._train(multiplier=sigma(self.epsilon))
        return play(seed, audit(client(seed, batch, train, [])))

    def imagine(self, seed: int, batch: Batch, observed: Released) -> dict[str, Any]:
        """Return the record of a client with this batch that releases what was observed."""
        train = self._train(noise=observed.update)
        return play(seed, audit(client(seed, batch, train, []))).note

    def clean(self, seed: int, batch: Batch) -> Tensor:
        """Return the update of a batch before noise."""
        start = vector(network(seed).state_dict())
        return vector(self._train()(network(seed), batch).state_dict()) - start


def _answer(optimizer: Any, update: Tensor) -> None:
    """Let a step of Opacus move the parameters by an update, whatever the gradients are."""
    sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]

    def add_noise() -> None:
        parts = iter(update.split(sizes))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                wanted = next(parts).reshape(parameter.shape).to(parameter.dtype)
                parameter.grad = -wanted / RATE * SIZE  # it is divided by the batch size next

    optimizer.add_noise = add_noise


class SecAgg(Mechanism):
    """SecAgg+ of three clients; the server sees the mean, and one client's record beside it."""

    def release(self, seed: int, batch: Batch) -> Released:
        """Run the client on its batch."""
        start = [value.numpy() for value in network(seed).state_dict().values()]
        draws = torch.Generator().manual_seed(seed)
        others = [
            Batch(torch.randn(SIZE, 3, 32, 32, generator=draws), batch.targets) for _ in range(2)
        ]

        class Digit(NumPyClient):
            def __init__(self, partition: int) -> None:
                self.batch = [batch, *others][partition]

            def fit(self, parameters: Any, config: Any) -> Any:
                model = network(seed)
                state = zip(model.state_dict(), map(torch.tensor, parameters), strict=True)
                model.load_state_dict(dict(state))
                arrays = [v.numpy() for v in trained(model, self.batch).state_dict().values()]
                return arrays, SIZE, {}

        def client_fn(context: Context) -> Client:
            return Digit(int(context.node_config["partition-id"])).to_client()

        notes: dict[int, dict[str, Any]] = {}
        means: list[Tensor] = []
        watched = audit(ClientApp(client_fn=client_fn, mods=[secaggplus_mod]))

        class Listening(ClientApp):
            def __call__(self, message: Message, context: Context) -> Message:
                reply = watched(message, context)
                record = None if reply.has_error() else reply.content.get(RECORD_KEY)
                if isinstance(record, ConfigRecord):
                    notes[int(context.node_config["partition-id"])] = read(str(record["note"]))
                return reply

        class Keeping(FedAvg):
            def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
                arrays = parameters_to_ndarrays(results[0][1].parameters)
                pairs = zip(arrays, start, strict=True)
                means.append(torch.tensor(np.concatenate([(a - b).ravel() for a, b in pairs])))
                return super().aggregate_fit(server_round, results, failures)

        server = ServerApp()

        @server.main()
        def main(grid: Any, context: Context) -> None:
            strategy = Keeping(
                fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters(start),
                min_fit_clients=3, min_available_clients=3,
            )  # fmt: skip
            secure = SecAggPlusWorkflow(3, 2, max_weight=SIZE)
            legacy = LegacyContext(context, ServerConfig(num_rounds=1), strategy)
            DefaultWorkflow(fit_workflow=secure)(grid, legacy)

        run_inline(server, Listening(), 3)
        return Released(means[0].double() * 3, notes[0])

    def imagine(self, seed: int, batch: Batch, observed: Released) -> dict[str, Any]:
        """Return the record of a client with this batch that releases what was observed."""
        return self.release(seed, batch).note  # nothing that was sent enters its record

    def clean(self, seed: int, batch: Batch) -> Tensor:
        """Return the update of a batch before noise."""
        start = vector(network(seed).state_dict())
        return vector(trained(network(seed), batch).state_dict()) - start


MECHANISMS: dict[str, tuple[type[Mechanism], tuple[float, ...]]] = {
    "LocalDpMod, clip 1": (LocalDp, EPSILONS),
    "clipping alone": (ClippingAlone, (0.0,)),
    "Opacus, DP-SGD": (Opacus, EPSILONS),
    "own clipping and noise": (OwnNoise, EPSILONS),
    "SecAgg+ of three": (SecAgg, (0.0,)),
}


# The game


def numbers(note: Any) -> Iterator[float]:
    """All numbers of a record, in their order."""
    if isinstance(note, Mapping):
        note = list(note.values())
    for value in note if isinstance(note, list) else [note]:
        if isinstance(value, list | Mapping):
            yield from numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)


def distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """How far two records are apart: 0 where they are equal, ∞ where texts alone differ."""
    if left == right:
        return 0.0
    pairs = list(zip(numbers(left), numbers(right), strict=False))
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs)) or math.inf


@dataclass
class Guesses:
    """Right guesses of one mechanism, by what the server looked at."""

    update: int = 0
    record: int = 0
    both: int = 0
    told: int = 0
    trials: int = 0


def trial(mechanism: Mechanism, seed: int, pool: Batch, found: Guesses) -> None:
    """One coin, one client, three guesses."""
    draws = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(pool), generator=draws)[: SIZE + 1]
    secret = int(torch.randint(2, (), generator=draws))
    first, other = pool[places[:SIZE]], pool[places[SIZE:]]
    candidates = (first, Batch.concatenate([first[: SIZE - 1], other]))
    observed = mechanism.release(seed, candidates[secret])
    clean = [mechanism.clean(seed, batch) for batch in candidates]
    middle, apart = (clean[0] + clean[1]) / 2, clean[1] - clean[0]
    by_update = int(float((observed.update - middle) @ apart) > 0)
    near = [
        distance(observed.note, mechanism.imagine(seed, batch, observed)) for batch in candidates
    ]
    tells = near[0] != near[1]
    by_record = int(near[1] < near[0]) if tells else int(torch.randint(2, (), generator=draws))
    found.trials += 1
    found.told += tells
    found.update += by_update == secret
    found.record += by_record == secret
    found.both += (by_record if tells else by_update) == secret


def shown(right: int, trials: int) -> str:
    """A share with Wilson's 95 % interval."""
    share, z = right / trials, 1.96
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials)
    half *= math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return f"{right} of {trials} ({middle - half:.2f} to {middle + half:.2f})"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Flower's log out of the table."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of cifar10_test.npz")
    parser.add_argument("--first", type=int, default=100, help="seed of the first trial")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--only", choices=list(MECHANISMS), help="one mechanism instead of all")
    arguments = lab.start(parser)
    pixels = lab.load(arguments.root, "test", 100, 2000)
    pool = Batch(lab.CIFAR10.normalize(pixels.inputs), pixels.targets)
    lab.print_header(
        "mechanism", "ε", "update alone", "record", "both", "trials whose records differ"
    )
    for name in [arguments.only] if arguments.only else MECHANISMS:
        kind, epsilons = MECHANISMS[name]
        for epsilon in epsilons:
            found = Guesses()
            with quiet():
                for seed in range(arguments.first, arguments.first + arguments.trials):
                    trial(kind(epsilon), seed, pool, found)
            columns = (
                shown(right, found.trials) for right in (found.update, found.record, found.both)
            )
            lab.print_row(
                name, f"{epsilon:g}" if epsilon else "–", *columns, f"{found.told} trials"
            )


if __name__ == "__main__":
    main()
