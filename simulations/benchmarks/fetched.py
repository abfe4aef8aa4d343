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
    flat,
    without_bn,
)

_RATE = 0.05
_STAND_INS = (
    "dataset", "dataset.utils", "dataset.utils.common", "dataset_preparation", "utils_data",
    "publications.fedavg_mnist.dataset",
)  # fmt: skip


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
        "fedpara of Flower": _fedpara,
        "fedpara, pFedPara": partial(_fedpara, "pfedpara"),
        "fedpara, FedPer": partial(_fedpara, "fedper"),
        "feddebug of Flower": _feddebug,
        "flanders, MNIST": _flanders,
        "flanders, Fashion-MNIST": partial(_flanders, "FMnist"),
        "heterofl of Flower": _heterofl,
        "depthfl of Flower": _depthfl,
        "fedmeta, FedAvg (Meta)": _fedmeta,
        "dasha, DASHA": _dasha,
        "dasha, MARINA": partial(_dasha, "MarinaClient"),
        "fednova of Flower": _fednova,
        "tamuna, FedAvg": _tamuna,
        "fedper of Flower": _fedper,
        "flwr_baselines, FedAvg on MNIST": _fedavg_mnist,
        "flwr_baselines, FEMNIST of LEAF": _femnist,
        "flwr_baselines, adaptive optimization": _adaptive,
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
    """Four images in mini-batches of two, or as many as configured; as pairs or as dictionaries."""
    count = int(context.run_config.get("images", 4))
    draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    images = torch.randint(0, 256, (count, *shape), generator=draws).float() / 255
    held: Any = TensorDataset(images, torch.arange(count))
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
    _older_client()
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

    _on_a_cpu()
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


def _fedpara(algorithm: str = "") -> Method:
    from fedpara.client import FlowerClient, PFlowerClient
    from fedpara.models import FC

    folder: list[str] = []

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = FC(param_type="standard" if algorithm == "fedper" else "lowrank")
        return made

    def client(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        loader = _loader(context, (1, 28, 28))
        if not algorithm:
            return FlowerClient(number, net(), loader, "cpu", 1)
        state = f"{folder[-1]}/client_{number}.pth"
        return PFlowerClient(number, net(), loader, loader, "cpu", 1, state, algorithm)

    def make() -> ClientApp:
        folder.append(tempfile.mkdtemp())
        return _app(client)()

    def config(server_round: int) -> dict[str, Any]:
        return {"curr_round": server_round, "eta_l": _RATE, "learning_decay": 0.99}

    strategy = _with(lists.FedAvg, {"on_fit_config_fn": config})
    return Method(make, net, strategy=strategy)


def _feddebug() -> Method:
    from feddebug.client import CNNFlowerClient
    from feddebug.models import LeNet

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = LeNet({"channels": 3, "num_classes": 10})
        return made

    def client(context: Context) -> Any:
        loader = _loader(context, (3, 32, 32))
        cid = int(context.node_config["partition-id"])
        return CNNFlowerClient(
            {"client_data_train": loader, "model": net(), "device": "cpu", "cid": cid}
        )

    config = {"lr": 0.001, "local_epochs": 1, "batch_size": 2}
    return Method(_app(client), net, strategy=_told(config))


def _flanders(which: str = "Mnist") -> Method:
    import flanders.client
    import flanders.models

    def load(_: Any, number: int, **__: Any) -> Any:
        told = SimpleNamespace(node_config={"partition-id": number}, run_config={})
        return _loader(told, (1, 28, 28))

    flanders.client.get_dataloader = load

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(flanders.models, f"{which}Net")()
        return made

    def client(context: Context) -> Any:
        torch.manual_seed(0)
        number = int(context.node_config["partition-id"])
        return getattr(flanders.client, f"{which}Client")(number, "none")

    config = {"batch_size": 2, "epochs": 1, "malicious": False}
    return Method(_app(client), net, strategy=_told(config))


class _Scores(nn.Module):
    """The scores of a model of HeteroFL, which takes and returns dictionaries."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores (B, K)."""
        labels = torch.zeros(len(images), dtype=torch.long)
        scores: torch.Tensor = self.net({"img": images, "label": labels})["score"]
        return scores


def _heterofl() -> Method:
    from heterofl.client import FlowerNumPyClient
    from heterofl.models import create_model

    settings = {
        "optimizer": "SGD", "lr": _RATE, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 1,
        "clip": True,
    }  # fmt: skip

    def made() -> nn.Module:
        torch.manual_seed(0)
        network: nn.Module = create_model({"model": "MLP"})
        return network

    def client(context: Context) -> Any:
        loader = _loader(context, (1, 28, 28))
        data = {"trainloader": loader, "label_split": torch.arange(4), "valloader": loader}
        return FlowerNumPyClient(made(), data, None, dict(settings))

    return Method(_app(client), lambda: _Scores(made()))


def _depthfl() -> Method:
    import os

    from depthfl.client import FlowerClient
    from depthfl.resnet import multi_resnet18

    _on_a_cpu()

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = multi_resnet18(n_blocks=2, num_classes=10)
        return made

    def client(context: Context) -> Any:
        made, number = net(), int(context.node_config["partition-id"])
        variates = {name: torch.zeros(each.numel()) for name, each in made.named_parameters()}
        loader, cpu = _loader(context, (3, 32, 32)), torch.device("cpu")
        return FlowerClient(made, loader, loader, cpu, 1, _RATE, 0.998, variates, number)

    def make() -> ClientApp:
        os.chdir(tempfile.mkdtemp())  # it keeps its variates in the working folder
        Path("prev_grads").mkdir()
        return _app(client)()

    def config(server_round: int) -> dict[str, Any]:
        return {
            "curr_round": server_round, "feddyn": True, "kd": True, "extended": True, "alpha": 0.1
        }  # fmt: skip

    return Method(make, net, strategy=_with(lists.FedAvg, {"on_fit_config_fn": config}))


def _fedmeta() -> Method:
    from fedmeta.client import FlowerClient
    from fedmeta.models import FemnistNetwork

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = FemnistNetwork()
        return made

    def client(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        loaders = {name: {number: _loader(context, (1, 28, 28))} for name in ("sup", "qry")}
        return FlowerClient(net(), loaders, loaders, str(number), torch.device("cpu"), 1, 0.001, 1)

    config = {"algo": "fedavg_meta"}
    return Method(_app(client), net, strategy=_told(config))


def _dasha(which: str = "DashaClient") -> Method:
    from dasha import client as clients
    from dasha.compressors import RandKCompressor, decompress
    from dasha.models import LinearNetWithNonConvexLoss
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

    held: dict[int, Any] = {}

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = LinearNetWithNonConvexLoss([64])
        return made

    def client(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        if number not in held:  # as on Flower's older runtime, where clients lived on
            draws = torch.Generator().manual_seed(number)
            data = TensorDataset(torch.rand(4, 64, generator=draws), torch.tensor([1, -1, 1, -1]))
            compressor = RandKCompressor(number, 8)
            held[number] = getattr(clients, which)(net(), data, torch.device("cpu"), compressor)
        return held[number]

    def make() -> ClientApp:
        held.clear()
        return _app(client)()

    class Server(lists.FedAvg):
        """The baseline's aggregation: a step along the mean of the decompressed vectors."""

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            self.now = parameters_to_ndarrays(parameters)[0]
            self.on_fit_config_fn = lambda number: {"send_full_gradient": number == 1}
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            told = [decompress(parameters_to_ndarrays(each.parameters)) for _, each in results]
            moved = self.now - _RATE * np.mean(told, axis=0)
            return ndarrays_to_parameters([moved.astype(np.float32)]), {}

    return Method(make, net, flat, Server)


def _fednova() -> Method:
    from fednova.client import FedNovaClient
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

    optimizer = {"_target_": "fednova.models.ProxSGD", "lr": _RATE, "momentum": 0.9, "mu": 0.005}

    def client(context: Context) -> Any:
        settings = SimpleNamespace(optimizer=optimizer, var_local_epochs=False, exp_name="nova")
        loader, number = _loader(context, (1, 8, 8)), str(context.node_config["partition-id"])
        return FedNovaClient(net(), number, loader, loader, torch.device("cpu"), 1, 0.5, settings)

    class Server(lists.FedAvg):
        """The baseline's aggregation of normalised sums of gradients."""

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            self.now = parameters_to_ndarrays(parameters)
            self.on_fit_config_fn = lambda _: {"lr": _RATE}
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            moved = [each.copy() for each in self.now]
            tau = sum(each.metrics["tau"] for _, each in results)
            for _, each in results:
                scale = tau * each.metrics["weight"] / each.metrics["local_norm"]
                for array, part in zip(moved, parameters_to_ndarrays(each.parameters), strict=True):
                    array -= np.float32(scale) * part
            return ndarrays_to_parameters(moved), {}

    return Method(_app(client), net, arrays_of, Server)


def _tamuna() -> Method:
    from tamuna.client import FedAvgClient
    from tamuna.models import Net

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = Net()
        return made

    def client(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        loader = _loader(context, (1, 28, 28))
        return FedAvgClient(net(), loader, torch.device("cpu"), _RATE, number)

    config = {"epochs": 1}
    return Method(_app(client), net, strategy=_told(config))


def _fedper() -> Method:
    from fedper import client as clients
    from fedper.implemented_models.mobile_model import MobileNetModelManager

    def manager(number: int, loader: Any) -> Any:
        torch.manual_seed(0)
        settings = {
            "num_epochs": 1, "learning_rate": _RATE, "num_classes": 10, "num_head_layers": 1,
            "device": "cpu", "model": {"num_head_layers": 1, "device": "cpu", "num_classes": 10},
            "server_device": "cpu", "dataset": {"num_classes": 10},
        }  # fmt: skip
        from omegaconf import OmegaConf

        return clients.FedPerClient(
            clients.ClientDataloaders(loader, loader), OmegaConf.create(settings),
            clients.ClientEssentials(str(number), tempfile.mkdtemp()), MobileNetModelManager,
        )  # fmt: skip

    def net() -> nn.Module:
        made: nn.Module = manager(0, None).model_manager.model
        return made

    def client(context: Context) -> Any:
        return manager(int(context.node_config["partition-id"]), _loader(context, (3, 224, 224)))

    def first(made: nn.Module) -> list[Any]:
        return [each.numpy().copy() for each in made.body.state_dict().values()]  # type: ignore[operator, union-attr]

    return Method(_app(client), net, first)


def _fedavg_mnist() -> Method:
    _older_client()
    from flwr_baselines.publications.fedavg_mnist import model
    from flwr_baselines.publications.fedavg_mnist.client import FlowerClient

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = model.Net()
        return made

    def client(context: Context) -> Any:
        loader = _loader(context, (1, 28, 28))
        return FlowerClient(net(), loader, loader, torch.device("cpu"), 1, _RATE)

    return Method(_app(client), net)


def _femnist() -> Method:
    _older_client()
    from flwr_baselines.publications.leaf.femnist import model
    from flwr_baselines.publications.leaf.femnist.client import FlowerClient

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = model.Net(62)
        return made

    def client(context: Context) -> Any:
        loader = _loader(context, (1, 28, 28))
        return FlowerClient(net(), loader, loader, loader, torch.device("cpu"), 1, 0.001)

    return Method(_app(client), net)


def _adaptive() -> Method:
    _older_client()
    from flwr_baselines.publications.adaptive_federated_optimization.cifar import client as clients

    def net() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = clients.get_cifar_model(10)
        return made

    def client(context: Context) -> Any:
        held = _loader(context, (3, 24, 24)).dataset
        clients.ClientDataset = lambda path_to_data, transform: held
        return clients.RayClient(str(context.node_config["partition-id"]), Path(), 10)

    return Method(_app(client), net, strategy=_told({"batch_size": 2, "epochs": 1}))


def _older_client() -> None:
    """Modules that are gone from Flower 1.41, which older baselines import their types from."""
    import flwr.client
    import flwr.common

    old = types.ModuleType("flwr.client.client")
    old.Client = flwr.client.Client  # type: ignore[attr-defined]
    sys.modules.setdefault("flwr.client.client", old)
    sys.modules.setdefault("flwr.common.parameter", flwr.common)


def _on_a_cpu() -> None:
    """Leave tensors where they are, as some baselines move them to a GPU on whatever machine."""
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _told(config: dict[str, Any]) -> Any:
    return _with(lists.FedAvg, {"on_fit_config_fn": lambda server_round: config})


def _with(strategy: Any, settings: dict[str, Any]) -> Any:
    class Set(strategy):  # type: ignore[misc]
        def __init__(self, **others: Any) -> None:
            super().__init__(**others, **settings)

    return Set
