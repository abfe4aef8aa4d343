"""From a Hydra config to the objects of an experiment; every error names its key."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import hydra
from flwr.serverapp.strategy import Strategy
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch import nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage._conf import conf_dir
from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.audit.progress import Progress
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.audit.targets import Selection, Truth
from flwr_leakage.data import FederatedDataset
from flwr_leakage.defenses.base import Defense
from flwr_leakage.flower.client import ClientAudit
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import initialize
from flwr_leakage.normalization import StatelessBatchNorm
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.tracking import CompositeTracker, JsonlTracker, Tracker

Config = dict[str, Any]


class ConfigError(ValueError):
    """A config that cannot be run, with the key that is wrong."""


@dataclass
class ClientSettings:
    """The ``client`` section of the config."""

    num_examples: int = 1
    batch_size: int = 1
    num_steps: int = 1
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    same_samples: bool = False
    max_samples: int = 1024
    num_threads: int | None = 1


@dataclass
class ScoringSettings:
    """The ``scoring`` section."""

    every: int = 1
    max_samples: int | None = None
    which: str = "first"
    products: int | None = None
    seconds: float | None = None
    keep_rounds: int | None = None
    send: bool = True


@dataclass
class ThreatSettings:
    """The ``threat`` section."""

    labels: str = "inferred"
    batch_norm: str = "none"
    view: str = "single"
    rounds: int = 1


@dataclass
class SelectionSettings:
    """The ``selection`` section."""

    every: int = 1
    first: int = 1
    clients: list[int] | None = None
    max_clients: int | None = None


@dataclass
class ServerSettings:
    """The ``server`` section."""

    attack_workers: int = 1
    attack_chunk: int = 16
    attack_folder: str | None = None
    num_threads: int | None = None
    test_samples: int | None = 1000
    wait_seconds: float = 60.0


@dataclass
class Settings:
    """All of the config that is not a group; OmegaConf checks the types."""

    seed: int = 0
    num_clients: int = 10
    num_rounds: int = 5
    run_dir: str = ""
    client: ClientSettings = field(default_factory=ClientSettings)
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    threat: ThreatSettings = field(default_factory=ThreatSettings)
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    server: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True)
class Experiment:
    """Everything that both apps share; a pure function of the config."""

    config: Config
    settings: Settings
    data: FederatedDataset
    network: nn.Module
    gradient_map: GradientMap
    schedule: LocalSchedule
    defense: Defense
    scores: Mapping[str, Score]
    attack: Attack | None
    threat: ThreatModel
    selection: Selection
    evaluator: Evaluator

    @property
    def spec(self) -> InputSpec:
        """What is public about the data."""
        return self.data.spec

    def client_batch(self, client_id: int, server_round: int) -> Batch:
        """The private samples of a client in a round."""
        return self._batch(client_id, server_round, self.settings.client.num_examples)

    def _batch(self, client_id: int, server_round: int, num_examples: int) -> Batch:
        drawn_in = 1 if self.settings.client.same_samples else server_round
        return self.data.client_batch(client_id, drawn_in, num_examples)

    def client_audit(self) -> ClientAudit:
        """The settings of the clients' mod; on a real node, no draws come from the seed."""
        client = self.settings.client
        node = self.config.get("node")
        return ClientAudit(
            gradient_map=self.gradient_map,
            spec=self.spec,
            schedule=self.schedule,
            defense=self.defense,
            scores=self.scores,
            seed=self.settings.seed if node is None else None,
            remark="" if node is None else node["remark"],
            score_plan=_checked("scoring", ScorePlan)(**vars(self.settings.scoring)),
            max_samples=client.max_samples,
            num_threads=client.num_threads,
        )

    def server_audit(self, tracker: Tracker, run: str, progress: Progress) -> ServerAudit:
        """The server's audit, which is given the truth to measure against it."""
        return ServerAudit(
            gradient_map=self.gradient_map,
            spec=self.spec,
            schedule=self.schedule,
            tracker=tracker,
            run=run,
            attack=self.attack,
            threat=self.threat,
            selection=self.selection,
            evaluator=self.evaluator,
            truth=self.truth,
            seed=self.settings.seed,
            progress=progress,
            num_rounds=self.settings.num_rounds,
        )

    def truth(self, server_round: int, client_id: int, num_examples: int) -> Truth:
        """Re-derive from the seed what a client trained on, and how its defense encoded it.

        Over several epochs, how it was encoded for the first one.
        """
        used = self.schedule.num_samples_used(num_examples)
        private = self._batch(client_id, server_round, num_examples)[:used]
        draws = Reproducible.from_seed(
            self.settings.seed, server_round=server_round, client_id=client_id, purpose="encode"
        )
        encoded = self.defense.on_batch(private, self.spec.num_classes, draws)
        return Truth(private, encoded)

    def caveats(self) -> list[str]:
        """What the numbers of this experiment do not say, to be told where they are."""
        if not self.defense.encodes_batches:
            return []
        found = [
            "Clients train on encodings: attacks recover these, and PSNR compares them with the "
            "private originals. Decoding them is not part of a run (docs/defenses.md)."
        ]
        if self.schedule.num_steps * self.schedule.batch_size > self.settings.client.num_examples:
            found.append(
                "Encodings are drawn anew in each epoch, but attacks and scores take the first "
                "epoch's as repeated: they cannot explain the update, and recovering little is no "
                "sign of safety. Train one epoch a round."
            )
        return found

    def strategy(self) -> Strategy:
        """A fresh strategy of the config's."""
        return _instantiate(self.config, "strategy")

    def tracker(self) -> Tracker:
        """The run folder's record, which the report reads, and the config's live view."""
        folder = JsonlTracker(self.settings.run_dir)
        live = _instantiate(self.config, "tracker")
        return CompositeTracker((folder, live)) if live else folder


def compose(overrides: list[str], run_dir: str) -> Config:
    """Compose the config without ``@hydra.main``, as apps under ``flwr run`` need it."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = hydra.compose(
            "config", [*overrides, f"run_dir={json.dumps(run_dir)}"], return_hydra_config=True
        )
    choices = cfg.hydra.runtime.choices
    with open_dict(cfg):
        del cfg["hydra"]
    return to_config(cfg, choices)


def to_config(cfg: DictConfig, choices: Mapping[str, Any]) -> Config:
    """Resolve a composed config to plain containers, which travel to other processes.

    Args:
        cfg: as composed, without Hydra's own section.
        choices: the chosen option of each config group; kept under ``choices``.

    Raises:
        ConfigError: a key without a default was not given.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError(f"{missing[0]} must be given: {missing[0]}=VALUE, got none.")
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    own = {key: str(value) for key, value in choices.items() if "/" not in key}
    return {**{str(key): value for key, value in config.items()}, "choices": own}


def build(config: Config) -> Experiment:
    """Build an experiment; the same config gives the same object within a process.

    Raises:
        ConfigError: naming the section that is wrong and why.
    """
    return _build(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=2)
def _build(text: str) -> Experiment:
    config: Config = json.loads(text)
    settings = _settings(config)
    seed, client = settings.seed, settings.client
    data = _data(config, settings)
    network = _network(config, data.spec, seed)
    schedule = _checked("client", LocalSchedule)(
        learning_rate=client.learning_rate,
        num_steps=client.num_steps,
        batch_size=client.batch_size,
        momentum=client.momentum,
        weight_decay=client.weight_decay,
    )
    gradient_map = _checked("model.batch_norm", GradientMap)(
        network, batch_norm=config["model"].get("batch_norm", "running")
    )
    selection = settings.selection
    experiment = Experiment(
        config=config,
        settings=settings,
        data=data,
        network=network,
        gradient_map=gradient_map,
        schedule=schedule,
        defense=_instantiate(config, "defense"),
        scores=_instantiate(config, "score") or {},
        attack=_attack(config, settings.server),
        threat=_checked("threat", ThreatModel)(**vars(settings.threat)),
        selection=_checked("selection", Selection)(
            every=selection.every,
            first=selection.first,
            clients=None if selection.clients is None else tuple(selection.clients),
            max_clients=selection.max_clients,
        ),
        evaluator=_instantiate(config, "metric"),
    )
    _check_clients(experiment)
    _check_threat(experiment)
    _check_defense(experiment)
    _checked("client", experiment.client_audit)()
    return experiment


def _check_clients(experiment: Experiment) -> None:
    settings = experiment.settings
    sizes = [len(part) for part in experiment.data.partitions]
    smallest = min(sizes)
    if settings.client.num_examples > smallest:
        raise ConfigError(
            f"client.num_examples must be at most {smallest}, the samples that the partition "
            f"gives client {sizes.index(smallest)}, got {settings.client.num_examples}."
        )
    chosen = settings.selection.clients
    if chosen is not None and not (chosen and set(chosen) <= set(range(len(sizes)))):
        raise ConfigError(
            f"selection.clients must name some of the clients 0 … {len(sizes) - 1}, or be null "
            f"for all, got {chosen}."
        )


def _check_threat(experiment: Experiment) -> None:
    """What the attacker is said to know must exist, as every result names it."""
    threat, client = experiment.threat, experiment.settings.client
    modules = experiment.gradient_map.model.modules()
    if threat.batch_norm != "none":
        if not any(isinstance(module, StatelessBatchNorm) for module in modules):
            raise ConfigError(
                "threat.batch_norm must be none for a model without BatchNorm, "
                f"got {threat.batch_norm}."
            )
        if experiment.gradient_map.batch_norm == "running":
            raise ConfigError(
                "threat.batch_norm must be none where model.batch_norm=running, as no client "
                f"normalises with statistics of its own, got {threat.batch_norm}."
            )
    if threat.rounds == 1:
        return
    if not client.same_samples:
        raise ConfigError(
            "threat.rounds must be 1 unless client.same_samples=true, as it explains all rounds "
            f"by the same samples, got {threat.rounds}."
        )
    if client.batch_size < client.num_examples:
        raise ConfigError(
            "threat.rounds must be 1 unless every step takes all of a client's samples, got "
            f"{threat.rounds} with client.batch_size={client.batch_size} and "
            f"client.num_examples={client.num_examples}."
        )
    if experiment.defense.encodes_batches:
        raise ConfigError(
            "threat.rounds must be 1 with a defense that encodes batches, as each round then "
            f"trains on other samples, got {threat.rounds}."
        )


def _check_defense(experiment: Experiment) -> None:
    settings, defense = experiment.settings, experiment.defense
    num_examples = settings.client.num_examples
    check = _checked("defense", defense.validate)
    used = experiment.schedule.num_samples_used(num_examples)
    check(experiment.gradient_map, experiment.spec, used)
    if defense.replaces_update and settings.client.max_samples < used:
        raise ConfigError(
            f"client.max_samples must be at least {used}, the samples of a round, as the defense "
            f"replays the training on all of them; got {settings.client.max_samples}."
        )
    account = _checked("defense", defense.epsilon)
    account(experiment.schedule, num_examples, settings.num_rounds)


def _settings(config: Config) -> Settings:
    own = {key: config[key] for key in Settings.__dataclass_fields__ if key in config}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Settings), own)
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    assert isinstance(settings, Settings)
    for name in ("num_clients", "num_rounds"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(settings, name)}.")
    if settings.seed < 0:
        raise ConfigError(f"seed must be ≥ 0, got {settings.seed}.")
    if settings.client.num_examples < 1:
        raise ConfigError(
            f"client.num_examples must be at least 1, got {settings.client.num_examples}."
        )
    test_samples = settings.server.test_samples
    if test_samples is not None and test_samples < 1:
        raise ConfigError(
            "server.test_samples must be at least 1, or null for the whole test set, got "
            f"{test_samples}."
        )
    return settings


def _data(config: Config, settings: Settings) -> FederatedDataset:
    train, test = _instantiate(config, "dataset")
    partition = _instantiate(config, "partition")
    generator = make_generator(settings.seed, purpose="partition")
    parts = _checked("partition", partition)(train.labels, generator)
    if len(parts) != settings.num_clients:
        raise ConfigError(
            f"partition must give one part for each of num_clients={settings.num_clients} "
            f"clients, got {len(parts)}."
        )
    return FederatedDataset(train, test, tuple(parts), settings.seed)


def _network(config: Config, spec: InputSpec, seed: int) -> nn.Module:
    network = _instantiate(
        config["model"], "network", input_shape=spec.shape, num_classes=spec.num_classes
    )
    scheme = config["model"].get("initialization", "default")
    _checked("model.initialization", initialize)(
        network, scheme, make_generator(seed, purpose="initialization")
    )
    return network


def _attack(config: Config, server: ServerSettings) -> Attack | None:
    attack = _instantiate(config, "attack") or None
    if attack is None or (server.attack_workers == 1 and server.attack_folder is None):
        return attack
    return _checked("server", Parallel)(
        attack, server.attack_workers, server.attack_chunk, server.attack_folder
    )


def _instantiate(config: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    node = config[key]
    if not node:
        return node
    try:
        return hydra.utils.instantiate(OmegaConf.create(node), _convert_="all", **arguments)
    except InstantiationException as error:
        raise ConfigError(f"{key}: {error.__cause__ or error}") from error


def _checked(key: str, function: Any) -> Any:
    """``function``, with the config key before what it complains about."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"{key}: {error}") from error

    return call
