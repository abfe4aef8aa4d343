"""Flower's own examples, from a fetched copy; their data alone are replaced."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import flwr.common.typing
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.server import strategy as lists
from flwr.serverapp import strategy as records
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_leakage._torchvision  # noqa: F401  # examples import torchvision
from simulations.benchmarks.methods import Method, arrays_of, state_of

_ABSENT = (
    "datasets", "flwr_datasets", "flwr_datasets.partitioner", "wandb", "flwr.client.typing",
    "torch.utils.tensorboard", "torch.utils.tensorboard.writer",
)  # fmt: skip
"""Modules that an example imports for its data, its logs, or types that are gone from Flower."""


@dataclass(frozen=True)
class _Example:
    """Where an example lies, and what it trains on.

    Attributes:
        package: of the app, below the folder of the example.
        shape: of an input.
        keys: of a batch that is a dictionary; without them it is a pair.
        settings: what the app finds in ``context.run_config``.
        net: the name of the model in the module ``task``.
        older: whether it is an app of ``flwr.client``.
        unnamed: whether its arrays have no names.
        rows: whether it takes arrays of training and test data in the place of loaders.
        labels: of the samples.
    """

    package: str
    shape: tuple[int, ...]
    keys: tuple[str, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    net: Callable[[Any], nn.Module] = lambda task: task.Net()
    older: bool = False
    unnamed: bool = False
    rows: bool = False
    labels: Tensor = field(default_factory=lambda: torch.arange(4))


_CIFAR, _GREY = (3, 32, 32), (1, 28, 28)
_RATES = {"batch-size": 2, "local-epochs": 1, "learning-rate": 0.05}

_EXAMPLES = {
    "quickstart-pytorch": _Example("pytorchexample", _CIFAR, ("img", "label"), _RATES),
    "advanced-pytorch": _Example("pytorch_example", _GREY, ("image", "label"), _RATES),
    "custom-mods": _Example("custom_mods", _CIFAR, ("img", "label"), _RATES),
    "embedded-devices": _Example("embeddedexample", _GREY, ("image", "label"), _RATES),
    "supernode-authentication": _Example("authexample", _CIFAR, ("img", "label"), _RATES),
    "fl-tabular": _Example(
        "fltabular", (14,), net=lambda task: task.IncomeClassifier(),
        labels=torch.tensor([[0.0], [1.0], [1.0], [0.0]]),
    ),
    "federated-vae": _Example("fedvaeexample", _CIFAR, ("img", "label"), _RATES),
    "flower-simulation-step-by-step-pytorch/my-awesome-app": _Example(
        "my_awesome_app", _GREY, ("image", "label"), _RATES, older=True
    ),
    "quickstart-numpy": _Example(
        "quickstart_numpy", (1, 1), net=lambda task: nn.Linear(1, 1), unnamed=True
    ),
    "quickstart-sklearn": _Example(
        "sklearnexample", (4,), None, {"penalty": "l2"}, lambda task: nn.Linear(4, 3),
        rows=True, unnamed=True, labels=torch.tensor([0, 1, 2, 0]),
    ),
}  # fmt: skip


def fetched_examples(folder: Path, images: int = 4) -> dict[str, Method]:
    """Return the apps of a fetched folder ``examples`` of Flower's repository.

    Args:
        folder: of the examples; one that it lacks is left out.
        images: samples of a client, at most four.
    """
    found = {}
    for name, example in _EXAMPLES.items():
        if (folder / name / example.package).is_dir():
            sys.path.insert(0, str((folder / name).resolve()))
            found[name] = _method(replace(example, labels=example.labels[:images]))
    return found


def _method(example: _Example) -> Method:
    for absent in _ABSENT:
        try:
            importlib.import_module(absent)
        except ImportError:
            sys.modules[absent] = MagicMock()
    flwr.common.typing.UserConfig = dict  # type: ignore[attr-defined]  # gone from Flower 1.41
    clients = importlib.import_module(f"{example.package}.client_app")
    task = importlib.import_module(f"{example.package}.task")
    loaders = partial(_data, example)
    for module in (clients, task):
        for load in ("load_data", "load_data_from_disk"):
            if hasattr(module, load):
                setattr(module, load, _by_name(loaders))

    def net() -> nn.Module:
        torch.manual_seed(0)
        return example.net(task)

    def make() -> ClientApp:
        os.chdir(tempfile.mkdtemp())  # some write to the working folder
        return _Configured(clients.app, example.settings)

    if example.older:
        rates = {"on_fit_config_fn": lambda server_round: {"lr": 0.05}}
        return Method(make, net, arrays_of, _told(lists.FedAvg, rates))
    return Method(make, net, arrays_of if example.unnamed else state_of, _FedAvg)


def _data(example: _Example, where: Any) -> Any:
    """Training and test data of a partition."""
    loader = _loader(example, int(where))
    if example.rows:
        held = loader.dataset.tensors
        return tuple(each.double().numpy() for each in (*held, *held))
    return loader, loader


def _by_name(load: Callable[..., Any]) -> Callable[..., Any]:
    """Examples name the partition, or give it first, or the folder of its data."""

    def loads(*given: Any, **named: Any) -> Any:
        return load(named["partition_id"] if "partition_id" in named else given[0])

    return loads


def _loader(example: _Example, partition: int) -> Any:
    """Samples in mini-batches of two, drawn by the seed of the partition."""
    draws = torch.Generator().manual_seed(partition)
    inputs = torch.randint(0, 256, (len(example.labels), *example.shape), generator=draws)
    inputs = inputs.float() / 127.5 - 1
    held: Any = TensorDataset(inputs, example.labels)
    if example.keys:
        held = [dict(zip(example.keys, pair, strict=True)) for pair in held]
    return DataLoader(held, batch_size=2)


class _Configured(ClientApp):
    """An example with its run config, and with its partition in the place of a folder of data."""

    def __init__(self, app: ClientApp, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._app, self._settings = app, dict(settings)

    def __call__(self, message: Message, context: Context) -> Message:
        seed = int(context.node_config["partition-id"])
        torch.manual_seed(seed)
        np.random.seed(seed)  # of libraries that draw from it
        context.run_config = {**context.run_config, **self._settings}
        context.node_config["dataset-path"] = str(context.node_config["partition-id"])
        return self._app(message, context)


class _FedAvg(records.FedAvg):
    """Tells clients a learning rate, as the examples' servers do."""

    def configure_train(
        self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any
    ) -> Any:
        """Add the rate."""
        config["lr"] = 0.05
        return super().configure_train(server_round, arrays, config, grid)


def _told(strategy: Any, settings: dict[str, Any]) -> Any:
    class Told(strategy):  # type: ignore[misc]
        def __init__(self, **others: Any) -> None:
            super().__init__(**others, **settings)

    return Told
