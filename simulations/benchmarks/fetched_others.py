"""Apps that other people published, from fetched copies; their data alone are replaced.

The repositories and their commits: VectorInstitute/FL4Health ce141b95, BasiaKoch/cleanest_federated
baabbaf, Sergo20025/mas-flwr-cifar100 e86cc0a, colinlaganier/FederatedDiffusionModels d86aac6,
fceccucci/OptML-Project 37497f9, reinesaj2/federated-ids 3413106f, lucacorbucci/FlowerFLTemplate
986fac1, alvieupnext/BrainAgeFederated 52491ea, Encore7/fluid fbfacdc,
arpit35/heterogeneous_federated_learning_with_conditional_variational_autoencoder 1cd9264,
LombardiGiacomo/master-thesis-fl-poisoning-simulated-annealing 61b0c61, tirohweder/dp-fedaug
b92bdc6, ericbanzuzi/hybrid-ffl-algorithms 1b8f571, Moltas18/FederatedLearning 0e7ddcc and
vinic011/intrusion-fl 094ca5b.
"""

import importlib
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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

import flwr_leakage._torchvision  # noqa: F401  # apps import torchvision
from simulations.benchmarks.fetched import _older_client, _with
from simulations.benchmarks.fetched_examples import _Example, _loader, _method
from simulations.benchmarks.methods import Method, arrays_of

_ABSENT = (
    "wandb", "wandb.wandb_run", "dp_accounting", "dp_accounting.rdp", "datasets", "flwr_datasets",
    "flwr_datasets.partitioner", "torchinfo", "seaborn", "nibabel", "fedlab", "fedlab.utils",
    "fedlab.utils.dataset", "fedlab.utils.dataset.functional", "matplotlib", "matplotlib.pyplot",
    "distributions",
)  # fmt: skip
"""Modules that an app imports for its data, its logs and its accounts."""

_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
_FLOATS = torch.tensor([0.1, 0.7, 0.4, 0.2])


@dataclass(frozen=True)
class _App:
    """A client of the older interface.

    Attributes:
        repository: OWNER/NAME, and the folder in it from which its modules are imported.
        make: makes a client from what imports a module, a loader, and the number of its partition.
        net: makes the server's model from what imports a module.
        data: the shape, the keys and the labels of its data.
        config: what the server tells in each round, beside the round's number.
        strategy: makes the class of the strategy from what imports a module.
        kept: whether a client lives on from round to round, as under ``start_client``.
    """

    repository: str
    make: Callable[[Any, Any, int], Any]
    net: Callable[[Any], nn.Module]
    data: _Example
    config: Mapping[str, Any] = field(default_factory=dict)
    strategy: Callable[[Any], Any] = lambda _: lists.FedAvg
    kept: bool = False


def _pixels(shape: tuple[int, ...], keys: tuple[str, str] | None = None, **others: Any) -> _Example:
    return _Example("", shape, keys, **others)


_FL4HEALTH = {
    "batch_size": 2, "downsampling_ratio": 0.75, "sample_percentage": 0.75,
    "beta": 1.0, "clipping_bound": 5.0, "noise_multiplier": 1.0, "adaptive_clipping": True,
    "sparsity_level": 0.1, "normalize": True, "filter_by_percentage": True,
    "select_drift_more": True, "norm_threshold": 24.5, "exchange_percentage": 0.5,
    "is_masked_model": True, "gamma": 0.25,
}  # fmt: skip


def _health(
    example: str, client: str, net: Callable[[Any], nn.Module], shape: tuple[int, ...] = _GREY,
    strategy: str = "basic_fedavg.BasicFedAvg", settings: Mapping[str, Any] | None = None,
    sends_model: bool = False, epochs: Mapping[str, int] | None = None, **others: Any,
) -> _App:  # fmt: skip
    """A client of FL4Health's examples, with that example's strategy."""

    def make(load: Any, loader: Any, number: int) -> Any:
        module = load(f"examples.{example}.client")
        for data in ("mnist", "cifar10"):
            setattr(module, f"load_{data}_data", lambda *_, **__: (loader, loader, {}))
            setattr(module, f"load_{data}_test_data", lambda *_, **__: (loader, {}))
        metrics = [load("fl4health.metrics").Accuracy("accuracy")]
        return getattr(module, client)(Path(str(number)), metrics, torch.device("cpu"), **others)

    def strategy_of(load: Any) -> Any:
        module, name = strategy.split(".")
        made = getattr(load(f"fl4health.strategies.{module}"), name)
        model = {"model": net(load)} if sends_model else {}

        class Strategy(made):  # type: ignore[misc]
            def __init__(self, **given: Any) -> None:
                own = inspect.signature(made).parameters
                given = {name: each for name, each in given.items() if name in own}
                super().__init__(**given, **(settings or {}), **model)

        return Strategy

    config = {**_FL4HEALTH, **(epochs or {"local_epochs": 1})}
    return _App(
        "VectorInstitute/FL4Health", make, net, _pixels(shape), config, strategy_of, kept=True
    )


def _cnn(name: str) -> Callable[[Any], nn.Module]:
    return lambda load: getattr(load("examples.models.cnn_model"), name)()


def _parallel(base: str) -> Callable[[Any], nn.Module]:
    def net(load: Any) -> nn.Module:
        parts = load("examples.models.parallel_split_cnn")
        joined = load("fl4health.model_bases.parallel_split_models")
        head = parts.ParallelSplitHeadClassifier(joined.ParallelFeatureJoinMode.CONCATENATE)
        module, name = base.split(".")
        made: nn.Module = getattr(load(f"fl4health.model_bases.{module}"), name)(
            parts.LocalCnn(), parts.GlobalCnn(), head
        )
        return made

    return net


def _moon_net(load: Any) -> nn.Module:
    parts = load("examples.models.moon_cnn")
    made: nn.Module = load("fl4health.model_bases.moon_base").MoonModel(
        parts.BaseCnn(), parts.HeadCnn(), parts.ProjectionCnn()
    )
    return made


def _gpfl_net(load: Any) -> nn.Module:
    parts = load("examples.models.sequential_split_models")
    made: nn.Module = load("fl4health.model_bases.gpfl_base").GpflModel(
        parts.SequentialGlobalFeatureExtractorMnist(), parts.SequentialLocalPredictionHeadMnist(),
        120, 10, True,
    )  # fmt: skip
    return made


def _fedrep_net(load: Any) -> nn.Module:
    parts = load("examples.models.sequential_split_models")
    made: nn.Module = load("fl4health.model_bases.fedrep_base").FedRepModel(
        base_module=parts.SequentialGlobalFeatureExtractorCifar(),
        head_module=parts.SequentialLocalPredictionHeadCifar(),
    )
    return made


def _apfl_net(load: Any) -> nn.Module:
    made: nn.Module = load("fl4health.model_bases.apfl_base").ApflModule(
        _cnn("MnistNetWithBnAndFrozen")(load)
    )
    return made


def _ensemble_net(load: Any) -> nn.Module:
    net = load("examples.models.ensemble_cnn").ConfigurableMnistNet
    parts = {f"model_{place}": net(out_channel_mult=place + 1) for place in range(3)}
    made: nn.Module = load("fl4health.model_bases.ensemble_base").EnsembleModel(parts)
    return made


def _sequential_net(load: Any) -> nn.Module:
    parts = load("examples.models.sequential_split_models")
    bases = load("fl4health.model_bases.sequential_split_models")
    made: nn.Module = bases.SequentiallySplitExchangeBaseModel(
        base_module=parts.SequentialGlobalFeatureExtractorMnist(),
        head_module=parts.SequentialLocalPredictionHeadMnist(),
    )
    return made


_PROX = "fedavg_with_adaptive_constraint.FedAvgWithAdaptiveConstraint"
_MINE: dict[str, Any] = {"minority_numbers": set()}


def _dermatology(client: str, **others: Any) -> _App:
    def make(load: Any, loader: Any, number: int) -> Any:
        module, named = client.split(".")
        return getattr(load(f"mnist_dermnist.fl_flower.{module}"), named)(
            number, loader.dataset, list(range(len(loader.dataset))),
            load("mnist_dermnist.models.dermmnist_cnn").DermMNISTCNN,
            seed=42, lr=0.01, momentum=0.9, weight_decay=1e-4, batch_size=2, **others,
        )  # fmt: skip

    def net(load: Any) -> nn.Module:
        made: nn.Module = load("mnist_dermnist.models.dermmnist_cnn").DermMNISTCNN()
        return made

    return _App("BasiaKoch/cleanest_federated", make, net, _pixels((3, 28, 28)), {"round": 1})


def _cifar100(load: Any, loader: Any, number: int) -> Any:
    data = SimpleNamespace(train_loader=loader, num_train=len(loader.dataset))
    storage = SimpleNamespace(get_client_data=lambda **_: data)
    agent = load("src.agents.compute_agent").ComputeAgent(number, storage=storage)
    return load("src.client_app").CifarClient(agent)


def _diffusion(load: Any, loader: Any, number: int) -> Any:
    model = load("model").Diffusion(1)
    return load("client").DiffusionClient(str(number), model, loader.dataset, loader.dataset)


def _lightning(load: Any, loader: Any, number: int) -> Any:
    cfg = SimpleNamespace(
        algorithm=SimpleNamespace(lr=1e-3, local_epochs=1),
        trainer=SimpleNamespace(precision="32-true"),
    )
    return load("src.client_app").FlowerClient(loader, loader, cfg)


def _intrusion(**runtime: Any) -> _App:
    def make(load: Any, loader: Any, number: int) -> Any:
        metrics = load("client_metrics")
        return load("client").TorchClient(
            load("client").SimpleNet(20, 4), loader, loader, torch.device("cpu"),
            metrics.ClientMetricsLogger(f"{number}.csv", number), metrics.ClientFitTimer(),
            {"n_classes": 4, "dataset_size": 4},
            {"use_focal_loss": True, "fedprox_mu": 0.1, **runtime},
        )  # fmt: skip

    def net(load: Any) -> nn.Module:
        made: nn.Module = load("client").SimpleNet(20, 4)
        return made

    return _App("reinesaj2/federated-ids", make, net, _pixels((20,)), kept=True)


def _template(load: Any, loader: Any, number: int) -> Any:
    triples = [(image, 0, label) for image, label in loader.dataset]
    settings = load("Utils.preferences").Preferences(
        dataset_name="mnist", optimizer="sgd", num_epochs=1
    )
    loader = torch.utils.data.DataLoader(triples, batch_size=2)  # type: ignore[arg-type]
    return load("Client.client").FlowerClient(loader, loader, settings, number)


def _brain_age(client: str) -> _App:
    def make(load: Any, loader: Any, number: int) -> Any:
        triples = [(image, age, str(place)) for place, (image, age) in enumerate(loader.dataset)]
        loader = torch.utils.data.DataLoader(triples, batch_size=2)  # type: ignore[arg-type]
        module = load("client")
        module.get_train_valid_loader = lambda *_, **__: ([loader] * 2, [loader] * 2)
        module.plot_age_distribution = lambda *_: None
        return getattr(module, client)(
            load("centralized").load_model(), "run", "./", {"ID": ["1"]}, number, f"client{number}",
            2, "cpu",
        )  # fmt: skip

    def net(load: Any) -> nn.Module:
        made: nn.Module = load("centralized").load_model()
        return made

    config = {"local_epochs": 1, "patience": 5, "proximal_mu": 0.1, "server_round": 1}
    data = _pixels((1, 32, 32, 32), labels=_FLOATS)
    return _App("alvieupnext/BrainAgeFederated/src", make, net, data, config)


def _fluid(load: Any, loader: Any, number: int) -> Any:
    held = SimpleNamespace(load_dataset_from_disk=lambda *_, **__: loader)
    load("src.client_app").DataLoader = lambda **_: held
    return load("src.client_app").FlowerClient(
        number, 2, 1, 0.05, ".", "image", "label", 1, 9, [0, 1], [], {"1": 1.0},
        "rapid-retraining", 2, 2,
    )  # fmt: skip


def _cvae(load: Any, loader: Any, number: int) -> Any:
    held = SimpleNamespace(load_dataset_from_disk=lambda *_, **__: loader)
    module = load("src.clients.flower_default_client")
    module.DataLoader = lambda **_: held
    return module.FlowerDefaultClient(number, 2, 1, 0.05, ".", ".", "image", "label", "cnn3")


def _kept_optimizer(load: Any, loader: Any, number: int) -> Any:
    net = load("src.models.CNN").CNN()
    return load("src.client_app").FlowerClient(
        net, loader, loader, 1, "cpu", nn.CrossEntropyLoss(),
        torch.optim.Adam(net.parameters(), lr=1e-3), Path(), None,
    )  # fmt: skip


_APPS: dict[str, _App] = {
    "FL4Health basic": _health("basic_example", "CifarClient", _cnn("Net"), _COLOUR),
    "FL4Health SCAFFOLD": _health(
        "scaffold_example", "MnistScaffoldClient", _cnn("MnistNetWithBnAndFrozen"),
        strategy="scaffold.Scaffold", sends_model=True,
    ),
    "FL4Health FedProx": _health(
        "fedprox_example", "MnistFedProxClient", _cnn("MnistNet"), strategy=_PROX
    ),
    "FL4Health Ditto": _health(
        "ditto_example", "MnistDittoClient", _cnn("MnistNet"), strategy=_PROX
    ),
    "FL4Health MR-MTL": _health(
        "mr_mtl_example", "MnistMrMtlClient", _cnn("MnistNet"), strategy=_PROX
    ),
    "FL4Health APFL": _health("apfl_example", "MnistApflClient", _apfl_net),
    "FL4Health FENDA": _health(
        "fenda_example", "MnistFendaClient", _parallel("fenda_base.FendaModel"), **_MINE
    ),
    "FL4Health PerFCL": _health(
        "perfcl_example", "MnistPerFclClient", _parallel("perfcl_base.PerFclModel"), **_MINE
    ),
    "FL4Health MOON": _health("moon_example", "MnistMoonClient", _moon_net, **_MINE),
    "FL4Health GPFL": _health("gpfl_example", "MnistGpflClient", _gpfl_net),
    "FL4Health FedRep": _health(
        "fedrep_example", "CifarFedRepClient", _fedrep_net, _COLOUR,
        epochs={"local_head_epochs": 1, "local_rep_epochs": 1},
    ),
    "FL4Health FedBN": _health(
        "fedbn_example", "MnistFedBnClient",
        lambda load: load("examples.models.cnn_model").MnistNetWithBnAndFrozen(False),
    ),
    "FL4Health FedPM": _health(
        "fedpm_example", "MnistFedPmClient",
        lambda load: load("examples.models.masked_model").Masked4Cnn(),
        strategy="fedpm.FedPm", **_MINE,
    ),
    "FL4Health DP-SGD": _health(
        "dp_fed_examples.instance_level_dp", "CifarClient", _cnn("Net"), _COLOUR
    ),
    "FL4Health dynamic layers": _health(
        "dynamic_layer_exchange_example", "CifarDynamicLayerClient", _cnn("Net"), _COLOUR,
        "fedavg_dynamic_layer.FedAvgDynamicLayer", store_initial_model=True,
    ),
    "FL4Health sparse tensors": _health(
        "sparse_tensor_partial_exchange_example", "CifarSparseCooTensorClient", _cnn("Net"),
        _COLOUR, "fedavg_sparse_coo_tensor.FedAvgSparseCooTensor",
    ),
    "FL4Health ensemble": _health("ensemble_example", "MnistEnsembleClient", _ensemble_net),
    "FL4Health FENDA and Ditto": _health(
        "fenda_ditto_example", "MnistFendaDittoClient", _sequential_net, strategy=_PROX
    ),
    "FL4Health FLASH": _health(
        "flash_example", "CifarFlashClient", _cnn("Net"), _COLOUR, "flash.Flash"
    ),
    "cleanest_federated FedProx": _dermatology("client.FlClient", proximal_mu=0.1),
    "cleanest_federated FedNova": _dermatology("client_fednova.FlClientFedNova"),
    "mas-flwr-cifar100": _App(
        "Sergo20025/mas-flwr-cifar100", _cifar100, lambda load: load("src.model").get_model(),
        _pixels(_COLOUR),
    ),
    "FederatedDiffusionModels DDPM": _App(
        "colinlaganier/FederatedDiffusionModels/DDPM", _diffusion,
        lambda load: load("model").Diffusion(1), _pixels((1, 32, 32)),
        {"epochs": 1, "batch_size": 2},
    ),
    "OptML-Project": _App(
        "fceccucci/OptML-Project", _lightning, lambda load: load("src.model").SmallCNN(),
        _pixels(_GREY),
    ),
    "federated-ids FedProx, focal loss": _intrusion(),
    "federated-ids DP": _intrusion(dp_enabled=True, dp_noise_multiplier=0.1),
    "federated-ids secure aggregation": _intrusion(secure_aggregation=True),
    "FlowerFLTemplate": _App(
        "lucacorbucci/FlowerFLTemplate/FlowerFLTemplate", _template,
        lambda load: load("Models.utils").get_model("mnist"), _pixels(_GREY),
    ),
    "BrainAgeFederated": _brain_age("FlowerClient"),
    "BrainAgeFederated FedProx": _brain_age("FedProxClient"),
    "fluid, rapid retraining": _App(
        "Encore7/fluid", _fluid,
        lambda load: load("src.ml_models.utils").initialize_model(load("src.ml_models.cnn").Net()),
        _pixels(_GREY, ("image", "label")),
    ),
    "Moltas18, kept Adam": _App(
        "Moltas18/FederatedLearning", _kept_optimizer, lambda load: load("src.models.CNN").CNN(),
        _pixels(_COLOUR, ("img", "label")), {"save_parameters": False}, kept=True,
    ),
    "heterogeneous CVAE, default client": _App(
        "arpit35/heterogeneous_federated_learning_with_conditional_variational_autoencoder",
        _cvae, lambda load: load("src.ml_models.cnn").CNN("cnn3"),
        _pixels(_GREY, ("image", "label")),
    ),
}  # fmt: skip


def _inputs_alone(loader: Any) -> Any:
    """Loaders of inputs without labels, and what stands for labels of a test."""
    inputs = [each for each, _ in loader.dataset]
    alone: Any = torch.utils.data.DataLoader(inputs, batch_size=2)  # type: ignore[arg-type]
    return alone, alone, alone, None


_RATES = {"batch-size": 2, "local-epochs": 1, "learning-rate": 0.05}
_HYBRID = {**_RATES, "dataset": "cifar10", "model": "resnet18", "group-norm": 1}
_RESNET = _Example(
    "src", _COLOUR, ("img", "label"), {**_HYBRID, "cli-strategy": "fedprox", "proximal-mu": 0.1},
    lambda task: task.ResNet18(dataset="cifar10", BN_to_GN=True), older=True,
    modules=("client", "models.resnet"),
)  # fmt: skip
_NAMED: dict[str, tuple[str, _Example]] = {
    "intrusion-fl": (
        "vinic011/intrusion-fl",
        _Example("src", (39,), None, _RATES, older=True, gives=_inputs_alone),
    ),
    "poisoning LSTM": (
        "LombardiGiacomo/master-thesis-fl-poisoning-simulated-annealing",
        _Example("LSTMfederated", (24, 11), None, _RATES, labels=_FLOATS),
    ),
    "dp-fedaug FedProx": (
        "tirohweder/dp-fedaug",
        _Example(
            "strategy.fedprox", (1, 32, 32), None,
            {
                **_RATES, "dataset": "mnist", "num-clients": 2, "num-local-epochs": 1,
                "gradient_clipping": True, "classification_type": "multi",
            },
            lambda task: task.get_model("mnist"),
        ),
    ),
    "hybrid-ffl FedProx, GroupNorm": ("ericbanzuzi/hybrid-ffl-algorithms", _RESNET),
    "hybrid-ffl Ditto": (
        "ericbanzuzi/hybrid-ffl-algorithms",
        replace(_RESNET, settings={**_HYBRID, "cli-strategy": "ditto"}),
    ),
    "hybrid-ffl q-FFL, LSTM": (
        "ericbanzuzi/hybrid-ffl-algorithms",
        _Example(
            "src", (80,), ("img", "label"),
            {**_RATES, "dataset": "shakespeare", "model": "lstm", "agg-strategy": "qffl"},
            lambda task: task.ShakespeareLSTM(), older=True, tokens=80,
            modules=("client", "models.lstm"),
        ),
    ),
}  # fmt: skip


def fetched_others(folder: Path, images: int = 4) -> dict[str, Method]:
    """Return the apps of fetched repositories.

    Args:
        folder: holds each repository in ``OWNER/NAME``; one that it lacks is left out.
        images: samples of a client, at most four.
    """
    for absent in _ABSENT:
        try:
            importlib.import_module(absent)
        except ImportError:
            sys.modules[absent] = MagicMock()
    _older_client()
    found = {}
    imported: dict[Path, dict[str, Any]] = {}
    for name, app in _APPS.items():
        if (folder / app.repository).is_dir():
            place = (folder / app.repository).resolve()
            cut = replace(app, data=replace(app.data, labels=app.data.labels[:images]))
            found[name] = _listed(cut, place, imported.setdefault(place, {}))
    for name, (repository, example) in _NAMED.items():
        if (folder / repository).is_dir():
            place = (folder / repository).resolve()
            with _imports(place, {}):  # its data stand in for those of these imports alone
                found[name] = _method(replace(example, labels=example.labels[:images]))
    return found


@contextmanager
def _imports(place: Path, own: dict[str, Any]) -> Iterator[None]:
    """Import modules of one repository, whose names others may have too; ``own`` keeps them."""
    before = Path.cwd()
    sys.path.insert(0, str(place))
    sys.modules.update(own)
    os.chdir(place)  # some read a file there as they are imported
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(place))
        tops = {each.stem for each in place.iterdir() if each.is_dir() or each.suffix == ".py"}
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            own[name] = sys.modules.pop(name)


def _listed(app: _App, place: Path, own: dict[str, Any]) -> Method:
    def load(name: str) -> Any:
        return own[name] if name in own else importlib.import_module(name)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return app.net(load)

    with _imports(place, own):
        _client(app, load, 0)  # imports what it needs
        strategy = app.strategy(load)
        net()

    def config(server_round: int) -> dict[str, Any]:
        return {**app.config, "current_server_round": server_round, "current_round": server_round}

    def make() -> ClientApp:
        os.chdir(tempfile.mkdtemp())  # some write to the working folder
        held: dict[int, Any] = {}

        def client(context: Context) -> Any:
            number = int(context.node_config["partition-id"])
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(number)
            if number not in held or not app.kept:
                held[number] = _client(app, load, number)
            return held[number].to_client()

        return ClientApp(client_fn=client)

    return Method(make, net, arrays_of, _with(strategy, {"on_fit_config_fn": config}))


def _client(app: _App, load: Any, number: int) -> Any:
    return app.make(load, _loader(app.data, number), number)
