"""Examples of Flower and of others, from fetched copies; their data alone are replaced."""

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
    "torch.utils.tensorboard", "torch.utils.tensorboard.writer", "torchaudio", "soundfile",
    "datasets.utils", "datasets.utils.logging", "huggingface_hub", "imblearn",
    "imblearn.over_sampling", "loguru", "syft_flwr", "syft_flwr.utils",
)  # fmt: skip
"""Modules that an example imports for its data, its logs, or types that are gone from Flower."""


_LOADS = (
    "load_data", "load_data_from_disk", "load_sim_data", "load_flwr_data", "load_syftbox_dataset",
)  # fmt: skip
_now = [0]
"""The partition of the client that runs, of apps that load data without its number."""


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
        labels: of the samples; for each loss that takes numbers in [0, 1], or one for each pixel.
        tokens: inputs are integers below this number.
        modules: of the package, for what loads data.
        gives: what a call to load data returns, made from a loader.
        stands: what stands in the place of further functions that read data.
        made: names of loaders that an app makes as it is imported.
    """

    package: str
    shape: tuple[int, ...]
    keys: tuple[str, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    net: Callable[[Any], nn.Module] = lambda task: task.Net()
    older: bool = False
    unnamed: bool = False
    labels: Tensor = field(default_factory=lambda: torch.arange(4))
    tokens: int = 0
    modules: tuple[str, ...] = ("client_app", "task")
    gives: Callable[[Any], Any] = lambda loader: (loader, loader)
    stands: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[str, ...] = ()


def _rows(loader: Any) -> Any:
    """Arrays of training and test data."""
    held = loader.dataset.tensors
    return tuple(each.double().numpy() for each in (*held, *held))


def _vision(part: str) -> Any:
    return importlib.import_module(f"torchvision.{part}")


def _alone(loader: Any) -> Any:
    return loader


def _thrice(loader: Any) -> Any:
    return loader, loader, loader


_CIFAR, _GREY = (3, 32, 32), (1, 28, 28)
_RATES = {"batch-size": 2, "local-epochs": 1, "learning-rate": 0.05}
_HUB = {
    **_RATES, "num-server-rounds": 20, "learning-rate-max": 1e-2, "learning-rate-min": 1e-4,
    "partitioner": "natural", "hidden-dim-1": 128, "hidden-dim-2": 64, "dropout": 0.1,
    "use-class-weights": True, "num-classes": 4, "roi-x": 32, "roi-y": 32, "roi-z": 32,
    "embed-dim": 64, "num-filters": 128,
}  # fmt: skip
_TWO_CLASSES = torch.tensor([0.0, 1.0, 1.0, 0.0])

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
        gives=_rows, unnamed=True, labels=torch.tensor([0, 1, 2, 0]),
    ),
    "quickstart-monai": _Example(
        "monaiexample", (1, 64, 64), ("img", "label"), _RATES, lambda task: task.load_model()
    ),
    "quickstart-fastai": _Example(
        "fastai_example", (3, 224, 224), gives=_thrice,
        net=lambda _: _vision("models").squeezenet1_1(),
    ),
    "quickstart-pennylane": _Example(
        "quickstart_pennylane", _CIFAR, ("img", "label"), _RATES, lambda task: task.QuantumNet()
    ),
    "quickstart-pytorch-lightning": _Example(
        "pytorchlightning_example", _GREY, ("image", "label"), {"max-epochs": 1},
        lambda task: task.LitAutoEncoder(), gives=_thrice,
    ),
    "e2e-pytorch": _Example(
        "e2e_pytorch", _CIFAR, older=True, modules=("client_app",),
        made=("trainloader", "testloader"),
    ),
    "e2e-pytorch-lightning": _Example(
        "e2e_pytorch_lightning", _GREY, ("image", "label"), {}, lambda task: task.LitAutoEncoder(),
        older=True, modules=("client_app", "mnist"), gives=_thrice,
    ),
    "fed-audio-tagging": _Example(
        "fedaudio", (1, 64, 126), ("features", "label"), _HUB, lambda task: task.make_model(),
        gives=_alone,
    ),
    "fed-fin-fraud": _Example(
        "fed_fraud", (15,), None, _HUB, lambda task: task.Net(15, 128, 64, 0.1), gives=_alone,
        labels=_TWO_CLASSES, stands={"get_input_dim": lambda: 15},
    ),
    "fed-med-seg": _Example(
        "fed_med_seg", (4, 32, 32, 32), ("image", "label"), _HUB, gives=_alone,
        labels=(torch.arange(4 * 32**3) % 4).reshape(4, 1, 32, 32, 32),
    ),
    "fed-phish-guard": _Example(
        "phishguard", (256,), ("input_ids", "label"), _HUB, lambda task: task.PhishingCNN(),
        modules=("client_app", "model"), tokens=258, labels=_TWO_CLASSES,
        gives=lambda loader: (loader, torch.tensor(1.0)),
    ),
    "opacus": _Example(
        "opacus_fl", _CIFAR, ("img", "label"), {"target-delta": 1e-5, "max-grad-norm": 1.0}
    ),
    "fl-diabetes-prediction": _Example(
        "fl_diabetes_prediction", (6,), older=True, labels=_TWO_CLASSES[:, None]
    ),
}  # fmt: skip


def fetched_examples(folder: Path, images: int = 4) -> dict[str, Method]:
    """Return the apps of a fetched folder, such as ``examples`` of Flower's repository.

    Args:
        folder: of the apps; one that it lacks is left out.
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
    _vision("datasets").CIFAR10 = MagicMock()
    modules = [importlib.import_module(f"{example.package}.{each}") for each in example.modules]
    clients, task = modules[0], modules[-1]
    stands = {**dict.fromkeys(_LOADS, _by_name(partial(_data, example))), **example.stands}
    for module in modules:
        for name, stand in stands.items():
            if hasattr(module, name):
                setattr(module, name, stand)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return example.net(task)

    def make() -> ClientApp:
        os.chdir(tempfile.mkdtemp())  # some write to the working folder
        return _Configured(clients, example)

    if example.older:
        rates = {"on_fit_config_fn": lambda server_round: {"lr": 0.05}}
        return Method(make, net, arrays_of, _told(lists.FedAvg, rates))
    return Method(make, net, arrays_of if example.unnamed else state_of, _FedAvg)


def _data(example: _Example, where: Any) -> Any:
    """Return the data that stand in for those of an app's partition."""
    return example.gives(_loader(example, int(where)))


def _by_name(load: Callable[..., Any]) -> Callable[..., Any]:
    """Examples name the partition, or give it first, or the folder of its data, or nothing."""

    def loads(*given: Any, **named: Any) -> Any:
        return load(named["partition_id"] if "partition_id" in named else (*given, _now[-1])[0])

    return loads


def _loader(example: _Example, partition: int) -> Any:
    """Samples in mini-batches of two, drawn by the seed of the partition."""
    draws = torch.Generator().manual_seed(partition)
    size = (len(example.labels), *example.shape)
    inputs = torch.randint(0, example.tokens or 256, size, generator=draws)
    if not example.tokens:
        inputs = inputs.float() / 127.5 - 1
    held: Any = TensorDataset(inputs, example.labels)
    if example.keys:
        held = [dict(zip(example.keys, pair, strict=True)) for pair in held]
    return DataLoader(held, batch_size=2)


class _Configured(ClientApp):
    """An example with its run config, and with its partition in the place of a folder of data."""

    def __init__(self, clients: Any, example: _Example) -> None:
        super().__init__()
        self._clients, self._example = clients, example

    def __call__(self, message: Message, context: Context) -> Message:
        seed = int(context.node_config["partition-id"])
        torch.manual_seed(seed)
        np.random.seed(seed)  # of libraries that draw from it
        context.run_config = {**context.run_config, **self._example.settings}
        context.node_config["dataset-path"] = str(seed)
        _now[:] = [seed]
        for name in self._example.made:
            setattr(self._clients, name, _loader(self._example, seed))
        return self._clients.app(message, context)


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
