"""Clients of Flower's own baselines, from a fetched copy; their data alone are replaced."""

import itertools
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.server import strategy as lists
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from simulations.benchmarks.methods import (
    Method,
    NovaStrategy,
    ScaffoldStrategy,
    arrays_of,
    without_bn,
)

_RATE = 0.05
_STAND_INS = ("dataset", "dataset_preparation", "utils_data")


def fetched_methods(folder: Path) -> dict[str, Method]:
    """Return the methods of a fetched folder ``baselines`` of Flower's repository.

    Args:
        folder: of the baselines; a method that it lacks is left out.
    """
    made = {
        "fedprox of Flower": _fedprox,
        "fedbn of Flower": _fedbn,
        "fedbn, FedAvg": partial(_fedbn, "FlowerClient"),
        "fedrep of Flower": _fedrep,
        "fedrep, FedAvg": partial(_fedrep, "BaseClient"),
        "floco of Flower": _floco,
        "floco, personal model too": partial(_floco, 1.0),
        "niid_bench fedavg": partial(_niid, "FedAvg"),
        "niid_bench fedprox": partial(_niid, "FedProx"),
        "niid_bench scaffold": partial(_niid, "Scaffold"),
        "niid_bench fednova": partial(_niid, "FedNova"),
        "moon of Flower": _moon,
        "moon, FedProx": partial(_moon, "fedprox"),
    }
    found = {}
    for name, make in made.items():
        package = name.split()[0].removesuffix(",")
        place = folder / package
        if (place / package).is_dir():
            if str(place) not in sys.path:
                sys.path.insert(0, str(place))
            for stand_in in _STAND_INS:
                sys.modules.setdefault(f"{package}.{stand_in}", MagicMock())
            found[name] = make()
    return found


def _loader(context: Context, shape: tuple[int, ...], keys: tuple[str, str] | None = None) -> Any:
    """Four images in two mini-batches, as pairs or as dictionaries."""
    draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    images = torch.randint(0, 256, (4, *shape), generator=draws).float() / 255
    held: Any = TensorDataset(images, torch.arange(4))
    if keys:
        held = [dict(zip(keys, pair, strict=True)) for pair in held]
    return DataLoader(held, batch_size=2)


def _app(make: Callable[[Context], Any]) -> Callable[[], ClientApp]:
    return lambda: ClientApp(client_fn=lambda context: make(context).to_client())


def _fedprox() -> Method:
    sys.modules.setdefault("easydict", types.ModuleType("easydict"))
    sys.modules["easydict"].EasyDict = SimpleNamespace  # type: ignore[attr-defined]
    from fedprox.client_app import FlowerClient
    from fedprox.model import LogisticRegression

    settings = SimpleNamespace(
        fit=SimpleNamespace(drop_client=False), algorithm=SimpleNamespace(mu=1.0)
    )

    def net() -> nn.Module:
        torch.manual_seed(0)
        return LogisticRegression(10)

    def client(context: Context) -> Any:
        loader = _loader(context, (1, 28, 28), ("image", "label"))
        configs = SimpleNamespace(run_config=settings)
        return FlowerClient(net(), loader, loader, 1, _RATE, np.zeros(9), configs)

    rounds = {"on_fit_config_fn": lambda server_round: {"current_round": server_round}}
    return Method(_app(client), net, strategy=_with(lists.FedAvg, rounds))


def _fedbn(which: str = "FedBNFlowerClient") -> Method:
    import fedbn.client_app
    from fedbn.model import CNNModel

    def net() -> nn.Module:
        torch.manual_seed(0)
        return CNNModel()

    def client(context: Context) -> Any:
        loader = _loader(context, (3, 28, 28))
        state = (context.state,) if personal else ()
        made = getattr(fedbn.client_app, which)
        return made(*state, net(), loader, loader, "none", _RATE)

    personal = which == "FedBNFlowerClient"
    rounds = {"on_fit_config_fn": lambda server_round: {"round": server_round}}
    first = without_bn if personal else arrays_of
    return Method(_app(client), net, first, _with(lists.FedAvg, rounds))


def _fedrep(which: str = "FedRepClient") -> Method:
    import flwr.client

    old = types.ModuleType("flwr.client.client")  # gone from Flower 1.41
    old.Client = flwr.client.Client  # type: ignore[attr-defined]
    sys.modules.setdefault("flwr.client.client", old)
    import fedrep.client_app
    from fedrep.constants import FEDREP_HEAD_STATE
    from fedrep.models import CNNCifar10, CNNCifar10ModelManager, CNNCifar10ModelSplit
    from flwr.app import ArrayRecord

    def net() -> nn.Module:
        torch.manual_seed(0)
        return CNNCifar10ModelSplit(CNNCifar10())

    def client(context: Context) -> Any:
        context.run_config = {"learning-rate": _RATE, "num-local-epochs": 1, "num-rep-epochs": ""}
        if which == "FedRepClient" and FEDREP_HEAD_STATE not in context.state.array_records:
            context.state.array_records[FEDREP_HEAD_STATE] = ArrayRecord()
        torch.manual_seed(0)
        loader = _loader(context, (3, 32, 32), ("img", "label"))
        manager = CNNCifar10ModelManager(context=context, trainloader=loader, testloader=loader)
        return getattr(fedrep.client_app, which)(manager)

    return Method(_app(client), net, lambda made: made.get_parameters())


def _niid(which: str) -> Method:
    import importlib

    module = importlib.import_module(f"niid_bench.client_{which.lower()}")
    from niid_bench.models import CNN

    client_class = getattr(module, f"FlowerClient{which}")
    variates = (Path(tempfile.mkdtemp()) / str(each) for each in itertools.count())
    folder: list[str] = []

    def net() -> nn.Module:
        torch.manual_seed(0)
        return CNN(400, [120, 84], 10)

    def client(context: Context) -> Any:
        loader = _loader(context, (3, 32, 32))
        common = (net(), loader, loader, torch.device("cpu"), 1)
        if which == "Scaffold":
            number = int(context.node_config["partition-id"])
            return client_class(number, *common, _RATE, 0.0, 0.0, folder[-1])
        mu: tuple[float, ...] = (0.5,) if which == "FedProx" else ()
        return client_class(*common, *mu, _RATE, 0.9, 0.0)

    def make() -> ClientApp:
        folder.append(str(next(variates)))  # a run keeps its clients' variates for itself
        return _app(client)()

    strategies = {"Scaffold": ScaffoldStrategy, "FedNova": NovaStrategy}
    return Method(make, net, arrays_of, strategies.get(which, lists.FedAvg))


def _floco(weight: float = 0.0) -> Method:
    """Of this weight of the personal model's regulariser; 0 for none."""
    from floco.client_app import FlowerClient
    from floco.model import SimplexModel

    def net() -> nn.Module:
        made: nn.Module = SimplexModel(endpoints=1, seed=0)
        return made

    def client(context: Context) -> Any:
        loader, cpu = _loader(context, (3, 32, 32), ("img", "label")), torch.device("cpu")
        return FlowerClient(0, net(), net(), weight, loader, loader, 1, cpu, context)

    return Method(_app(client), net)


class _Last(nn.Module):
    """The logits of MOON's model, which returns three tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, K)."""
        return self.net(images)[2]


def _moon(which: str = "moon") -> Method:
    from moon.client import FlowerClient
    from moon.models import init_net

    # The baseline moves tensors to a GPU whatever machine it runs on.
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    folder: list[str] = []

    def net() -> nn.Module:
        torch.manual_seed(0)
        return _Last(init_net("cifar10", "simple-cnn", 256))

    def client(context: Context) -> Any:
        torch.manual_seed(0)
        number = int(context.node_config["partition-id"])
        loader = _loader(context, (3, 32, 32))
        return FlowerClient(
            number, "cifar10", "simple-cnn", 256, loader, loader, "cpu", 1, _RATE,
            1.0 if which == "moon" else 0.01, 0.5, folder[-1], which,
        )  # fmt: skip

    def make() -> ClientApp:
        folder.append(tempfile.mkdtemp())
        return _app(client)()

    return Method(make, net)


def _with(strategy: Any, settings: dict[str, Any]) -> Any:
    class Set(strategy):  # type: ignore[misc]
        def __init__(self, **others: Any) -> None:
            super().__init__(**others, **settings)

    return Set
