"""From a config to an experiment that is checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from torch import nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.data import FederatedDataset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import initialize
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.scores.base import Score
from flwr_leakage.simulation.arguments import check_node, check_section
from flwr_leakage.simulation.checks import check_experiment, check_settings
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.nodes import checked, instantiate, instantiate_each
from flwr_leakage.simulation.settings import ClientSettings, ServerSettings, Settings


@dataclass(frozen=True)
class Sections:
    """The sections of a config, which most often name the target that reads them.

    ``score`` is a mapping of names to such sections; ``client`` and ``server`` are read into
    ``Settings``, ``model`` as a ``ModelSection``.
    """

    client: Mapping[str, Any]
    server: Mapping[str, Any]
    dataset: Mapping[str, Any]
    partition: Mapping[str, Any]
    model: Mapping[str, Any]
    strategy: Mapping[str, Any]
    defense: Mapping[str, Any]
    score: Mapping[str, Any]
    scoring: Mapping[str, Any]
    attack: Mapping[str, Any]
    threat: Mapping[str, Any]
    selection: Mapping[str, Any]
    metric: Mapping[str, Any]
    tracker: Mapping[str, Any]
    engine: Mapping[str, Any]


@dataclass(frozen=True)
class ModelSection:
    """The ``model`` section beside ``network``: its weights, and how its BatchNorm trains."""

    initialization: str
    batch_norm: str


def build(config: Config) -> Experiment:
    """Build an experiment and check it.

    Both apps ask for it at each call, in every process. The last two are kept, by the text of the
    whole config: the same config gives the same object, and nobody may change it.

    Raises:
        ConfigError: naming the key that is wrong and why.
    """
    return _build(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=2)
def _build(text: str) -> Experiment:
    config: Config = json.loads(text)
    settings, schedule = read_settings(config)
    # What is built when the run starts is checked before.
    check_node("engine", config["engine"], given=("server_app", "client_app", "num_clients"))
    if config["tracker"]:
        check_node("tracker", config["tracker"])
    data = _data(config, settings)
    network = _network(config, data.spec, settings.seed)
    experiment = Experiment(
        config=config,
        settings=settings,
        data=data,
        network=network,
        gradient_map=checked("model.batch_norm", GradientMap)(
            network, batch_norm=config["model"]["batch_norm"]
        ),
        schedule=schedule,
        defense=instantiate(config, "defense"),
        scores=instantiate_each(config, "score", Score),
        score_plan=instantiate(config, "scoring"),
        attack=_attack(config, settings.server),
        threat=instantiate(config, "threat"),
        selection=instantiate(config, "selection"),
        evaluator=instantiate(config, "metric"),
    )
    check_experiment(experiment)
    return experiment


def read_settings(config: Config) -> tuple[Settings, LocalSchedule]:
    """What of a config belongs to no group, and the local schedule of its ``client`` section.

    Raises:
        ConfigError: naming a key that is unknown, missing, of another type, or out of range.
    """
    # Only the names of sections here: each is checked by what reads it.
    top = {name: {} if isinstance(value, Mapping) else value for name, value in config.items()}
    del top["choices"]  # which option of each group was chosen, kept by ``to_config``
    check_section("", top, [Settings, Sections])
    check_section("client", config["client"], [ClientSettings, LocalSchedule])
    check_section("server", config["server"], [ServerSettings])
    model = {name: value for name, value in config["model"].items() if name != "network"}
    check_section("model", model, [ModelSection])
    settings = Settings(
        **_take(Settings, config)
        | {
            "client": ClientSettings(**_take(ClientSettings, config["client"])),
            "server": ServerSettings(**config["server"]),
        }
    )
    check_settings(settings)
    schedule = checked("client", LocalSchedule)(**_take(LocalSchedule, config["client"]))
    return settings, schedule


def _data(config: Config, settings: Settings) -> FederatedDataset:
    train, test = instantiate(config, "dataset")
    partition = instantiate(config, "partition")
    generator = make_generator(settings.seed, purpose="partition")
    parts = checked("partition", partition)(train.labels, generator)
    if len(parts) != settings.num_clients:
        raise ConfigError(
            f"partition must give one part for each of num_clients={settings.num_clients} "
            f"clients, got {len(parts)}."
        )
    return FederatedDataset(train, test, tuple(parts), settings.seed)


def _network(config: Config, spec: InputSpec, seed: int) -> nn.Module:
    network: nn.Module = instantiate(
        config, "model.network", input_shape=spec.shape, num_classes=spec.num_classes
    )
    scheme = config["model"]["initialization"]
    checked("model.initialization", initialize)(
        network, scheme, make_generator(seed, purpose="initialization")
    )
    return network


def _attack(config: Config, server: ServerSettings) -> Attack | None:
    if not config["attack"]:
        return None
    attack: Attack = instantiate(config, "attack")
    if server.attack_workers == 1 and server.attack_folder is None:
        return attack
    return checked("server", Parallel)(
        attack, server.attack_workers, server.attack_chunk, server.attack_folder
    )


def _take(kind: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a section that are fields of a dataclass."""
    return {field.name: section[field.name] for field in fields(kind) if field.name in section}
