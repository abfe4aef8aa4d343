"""From a config to an experiment that is checked."""

import json
from functools import lru_cache

from torch import nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.data import FederatedDataset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import initialize
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec
from flwr_leakage.scores.base import Score
from flwr_leakage.simulation.arguments import check_node
from flwr_leakage.simulation.checks import check_experiment, check_settings
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.nodes import checked, instantiate, instantiate_each
from flwr_leakage.simulation.settings import ServerSettings, Settings, read_settings


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
    settings = read_settings(config)
    check_settings(settings)
    # Engine and tracker are built only when the run starts; errors in their config come now.
    check_node("engine", config["engine"], given=("server_app", "client_app", "num_clients"))
    if config["tracker"]:
        check_node("tracker", config["tracker"])
    data = _data(config, settings)
    network = _network(config, data.spec, settings)
    experiment = Experiment(
        config=config,
        settings=settings,
        data=data,
        network=network,
        gradient_map=checked("model.batch_norm", GradientMap)(
            network, batch_norm=settings.model.batch_norm
        ),
        schedule=settings.schedule,
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


def _network(config: Config, spec: InputSpec, settings: Settings) -> nn.Module:
    network: nn.Module = instantiate(
        config, "model.network", input_shape=spec.shape, num_classes=spec.num_classes
    )
    generator = make_generator(settings.seed, purpose="initialization")
    checked("model.initialization", initialize)(network, settings.model.initialization, generator)
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
