"""Build the experiment that a config describes, and check it."""

import inspect
import json
from functools import lru_cache
from typing import Any

import hydra
import torch
from torch import nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.audit import LargeClients, Selection
from flwr_leakage.audit.candidates import DrawnCandidates
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.self_attack import SelfAttack
from flwr_leakage.data import FederatedDataset
from flwr_leakage.data.partitions import Partition
from flwr_leakage.defenses.base import Defense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import NextToken
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import initialize
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec, ThreatModel
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.simulation.arguments import check_node
from flwr_leakage.simulation.checks import check_experiment, check_settings
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.nodes import checked, instantiate, instantiate_each
from flwr_leakage.simulation.settings import ServerSettings, Settings, read_settings
from flwr_leakage.simulation.weights import load_weights
from flwr_leakage.tracking import Tracker
from flwr_leakage.tracking.tracker import check_role


def build(config: Config, remark: str | None = None) -> Experiment:
    """Return the experiment that a config describes, after checking it.

    Both apps call this for every message, in every process. The last two experiments are cached by
    the text of the whole config. So an equal config gives the same object, which must not be
    changed. ``remark`` is the text on its own config that a client on a real node sends to the
    server; ``None`` in a simulation.

    Raises:
        ConfigError: a setting is wrong. The message names the key and the reason.
    """
    # Only the top level is sorted, as the order of keys within a section may matter, such as the
    # order in which attacks are tried.
    return _build(json.dumps(dict(sorted(config.items()))), remark)


@lru_cache(maxsize=2)
def _build(text: str, remark: str | None) -> Experiment:
    config: Config = json.loads(text)
    settings = read_settings(config)
    check_settings(settings)
    # Engine and tracker are built only when the run starts. Checking them here makes errors in
    # their config appear early.
    check_node("engine", config["engine"], given=("server_app", "client_app", "num_clients"))
    if config["tracker"]:
        check_node("tracker", config["tracker"], kind=Tracker)

    def optional(section: str, kind: type) -> Any:
        return instantiate(config, section, kind) if config[section] else None

    data = _data(config, settings)
    # A client on a real node (which has a remark) gets its weights by message, and reads no file
    # that the run's config names.
    network = _network(config, data.spec, settings, None if remark else settings.model.weights)
    experiment = Experiment(
        config=config,
        settings=settings,
        data=data,
        network=network,
        gradient_map=checked("model.batch_norm", GradientMap)(
            network,
            NextToken(data.spec.padding) if data.spec.next_token else F.cross_entropy,
            settings.model.batch_norm,
        ),
        schedule=settings.schedule,
        defense=instantiate(config, "defense", Defense),
        scores=instantiate_each(config, "score", Score),
        score_plan=instantiate(config, "scoring", ScorePlan),
        what_ifs=_what_ifs(config),
        attack=_attack(config, settings.server),
        threat=instantiate(config, "threat", ThreatModel),
        selection=instantiate(config, "selection", Selection),
        large_clients=optional("large_clients", LargeClients),
        evaluator=instantiate(config, "metric", Evaluator),
        remark=remark,
        self_attack=optional("self_attack", SelfAttack),
        gate=optional("gate", Gate),
        membership=optional("membership", DrawnCandidates),
    )
    check_experiment(experiment)
    return experiment


def _data(config: Config, settings: Settings) -> FederatedDataset:
    train, test = instantiate(config, "dataset", tuple)
    partition = instantiate(config, "partition", Partition)
    generator = make_generator(settings.seed, purpose="partition")
    parts = checked("partition", partition)(train.labels, generator)
    if len(parts) != settings.num_clients:
        raise ConfigError(
            f"partition must give one part for each of num_clients={settings.num_clients} "
            f"clients, got {len(parts)}."
        )
    return FederatedDataset(train, test, tuple(parts), settings.seed)


def _network(config: Config, spec: InputSpec, settings: Settings, weights: str | None) -> nn.Module:
    sizes: dict[str, Any] = {"input_shape": spec.shape, "num_classes": spec.num_classes}
    if takes_texts(config) != spec.is_text:
        kind, other = ("token ids", "images") if spec.is_text else ("images", "token ids")
        raise ConfigError(
            f"model must take the dataset's {kind}, got {config['choices'].get('model')}, which "
            f"takes {other}: choose model=text_transformer for texts, and any other for images."
        )
    if spec.is_text:
        sizes |= {"vocabulary": spec.vocabulary, "padding": spec.padding}
    network: nn.Module = instantiate(config, "model.network", nn.Module, **sizes)
    if spec.next_token:
        shape = tuple(network(spec.blank(1, torch.zeros(()))).shape[1:])
        if shape != spec.output_shape:
            raise ConfigError(
                f"model must have logits {spec.output_shape} of the next token at each position, "
                f"got {shape}: choose model=text_decoder."
            )
    generator = make_generator(settings.seed, purpose="initialization")
    checked("model.initialization", initialize)(network, settings.model.initialization, generator)
    if weights is not None:
        checked("model.weights", load_weights)(network, weights)
    return network


def takes_texts(config: Config) -> bool:
    """Return whether the model's constructor takes a vocabulary, as models of texts do."""
    target = hydra.utils.get_object(config["model"]["network"]["_target_"])
    return "vocabulary" in inspect.signature(target).parameters


def _what_ifs(config: Config) -> dict[str, Defense]:
    found = instantiate_each(config, "what_if", Defense)
    for name in found:
        checked(f"what_if.{name}", check_role)(f"what_if_{name}")
    return found


def _attack(config: Config, server: ServerSettings) -> Attack | None:
    if not config["attack"]:
        return None
    attack: Attack = instantiate(config, "attack", Attack)
    workers = checked("server.attack_workers", attack_workers)(server)
    return checked("server", Parallel)(attack, workers, server.attack_chunk, server.attack_folder)


def attack_workers(server: ServerSettings) -> int | RayTasks:
    """Return how attacks run: the number of processes; or, for a Ray cluster, the resources of a
    task.

    Raises:
        ValueError: ``attack_workers`` is a text other than ``ray``, or a resource is negative.
    """
    if server.attack_workers == "ray":
        return RayTasks(server.attack_cpus, server.attack_gpus, server.attack_retries)
    if isinstance(server.attack_workers, str):
        raise ValueError(f"it must be a number or ray, got {server.attack_workers!r}.")
    return server.attack_workers
