"""Hold the config sections that belong to no class of the package.

Their defaults are in ``config.yaml``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flwr_leakage.audit.kept import KeptPolicy
from flwr_leakage.flower.strategy import BadReplies
from flwr_leakage.models.initialization import Scheme
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import LocalSchedule
from flwr_leakage.schedules import EpochSchedule, Schedule
from flwr_leakage.simulation.arguments import check_section
from flwr_leakage.simulation.config import Config
from flwr_leakage.simulation.nodes import checked


@dataclass(frozen=True)
class ClientSettings:
    """The settings of the ``client`` section, apart from ``TrainingSettings``.

    Attributes:
        num_examples: the number of private samples that a client trains on in a round, ≥ 1;
            ``None`` for all that it has.
        same_samples: whether a client uses the same samples in each round; if not, it goes on to
            its next samples in each round.
        max_samples: the number of samples that are kept for scores and defenses, ≥ 1.
        num_threads: the number of torch threads of a client, ≥ 1; ``None`` leaves torch's setting
            as it is.
        share: the results of clients' attacks on their own updates that are sent to the server, see
            ``ClientAudit``.
        folder: the folder for the record that each client keeps for its owner; ``None`` for none.
    """

    num_examples: int | None
    same_samples: bool
    max_samples: int
    num_threads: int | None
    share: str | Sequence[str]
    folder: str | None


@dataclass(frozen=True)
class TrainingSettings:
    """The local training, the part of the ``client`` section that the server determines.

    Attributes:
        learning_rate: the learning rate of SGD.
        batch_size: the number of samples in a step.
        epochs: the number of passes over a client's samples of the round; clients of different
            sizes then take different numbers of steps.
        num_steps: the number of steps of every client, in the place of epochs; ``None`` to train by
            epochs.
        momentum: the momentum of SGD.
        weight_decay: the weight decay of SGD.
    """

    learning_rate: float
    batch_size: int = 1
    epochs: int = 1
    num_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def schedule(self) -> Schedule:
        """Return the schedule of the local training, by steps or by epochs."""
        rest = (self.batch_size, self.momentum, self.weight_decay)
        if self.num_steps is None:
            return EpochSchedule(self.learning_rate, self.epochs, *rest)
        return LocalSchedule(self.learning_rate, self.num_steps, *rest)


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the ``server`` section.

    Attributes:
        attack_workers: the number of processes that attack, ≥ 1, or ``ray`` for tasks of a Ray
            cluster.
        attack_cpus: the number of CPUs that a Ray task asks for, ≥ 0.
        attack_gpus: the number of GPUs that a Ray task asks for, ≥ 0.
        attack_retries: the number of times that a Ray task is repeated if its worker or node died,
            ≥ 0.
        attack_chunk: the number of targets that are attacked together in a process, ≥ 1.
        attack_folder: the folder for the results of chunks that are finished; ``None`` to store
            none.
        attack_max_seconds: the CPU seconds that an attack may take for each target, > 0; ``None``
            for no limit but the attack's own.
        what_if_max_seconds: the CPU seconds that the attack on an update under one of ``what_if``'s
            defenses may take, > 0; the smaller of this and ``attack_max_seconds`` holds. ``None``
            for ``attack_max_seconds`` alone.
        attack_later: whether updates are stored in ``run_dir/kept`` instead of being attacked
            within the round; ``flwr-leakage attack-kept`` attacks them after the run.
        kept_bytes: the largest number of bytes of all stored updates, ≥ 1.
        kept_policy: the rule that chooses which rounds are deleted if ``kept_bytes`` is exceeded,
            see ``KeptObservations``.
        num_threads: the number of torch threads of attacks and evaluation, ≥ 1; ``None`` leaves
            torch's setting as it is.
        test_samples: the number of samples for the global model's test accuracy, ≥ 1; ``None`` for
            the whole test set.
        weights_every: the number of rounds from one saved global model to the next, ≥ 1; ``None``
            saves only the last one.
        wait_seconds: the seconds to wait until there is a node for every client, ≥ 0.
        bad_replies: ``drop`` leaves out clients' replies that would break or poison an aggregation;
            ``pass`` gives all replies to the strategy, as Flower does without an audit.
    """

    attack_workers: int | str
    attack_cpus: float
    attack_gpus: float
    attack_retries: int
    attack_chunk: int
    attack_folder: str | None
    attack_max_seconds: float | None
    what_if_max_seconds: float | None
    attack_later: bool
    kept_bytes: int
    kept_policy: KeptPolicy
    num_threads: int | None
    test_samples: int | None
    weights_every: int | None
    wait_seconds: float
    bad_replies: BadReplies


@dataclass(frozen=True)
class ModelSettings:
    """The settings of the ``model`` section, apart from ``network``.

    Attributes:
        initialization: the scheme by which the weights are drawn.
        batch_norm: the mode of BatchNorm in training, ``running`` or ``batch`` statistics.
        weights: a safetensors file with weights to start from; ``None`` for drawn weights.
    """

    initialization: Scheme = "default"
    batch_norm: BatchNormMode = "running"
    weights: str | None = None


@dataclass(frozen=True)
class TopLevel:
    """The values at the top of the config.

    Attributes:
        seed: the seed of every random draw, in [0, 2^63).
        num_clients: the number of clients, ≥ 1, each with a partition of the data.
        num_rounds: the number of rounds of training, ≥ 1.
        run_dir: the folder for numbers, images, the config and the report.
        objective: the names of one or several measures of ``flwr_leakage.comparison`` that a
            sweeper optimises, or ``None``.
    """

    seed: int
    num_clients: int
    num_rounds: int
    run_dir: str
    objective: str | Sequence[str] | None


@dataclass(frozen=True)
class Settings(TopLevel):
    """The values at the top of the config, and the settings of its sections that no class owns."""

    client: ClientSettings
    schedule: Schedule
    server: ServerSettings
    model: ModelSettings


@dataclass(frozen=True)
class Sections:
    """The sections of a config; most name the class or function that reads them as ``_target_``.

    ``score`` and ``what_if`` are mappings of names to such sections; ``client`` and ``server`` are
    read into ``Settings``, ``model`` into a ``ModelSettings``.
    """

    client: Mapping[str, Any]
    server: Mapping[str, Any]
    dataset: Mapping[str, Any]
    partition: Mapping[str, Any]
    model: Mapping[str, Any]
    strategy: Mapping[str, Any]
    defense: Mapping[str, Any]
    self_attack: Mapping[str, Any]
    gate: Mapping[str, Any]
    membership: Mapping[str, Any]
    score: Mapping[str, Any]
    scoring: Mapping[str, Any]
    what_if: Mapping[str, Any] | None
    attack: Mapping[str, Any]
    threat: Mapping[str, Any]
    selection: Mapping[str, Any]
    large_clients: Mapping[str, Any] | None
    metric: Mapping[str, Any]
    tracker: Mapping[str, Any]
    engine: Mapping[str, Any]


def read_settings(config: Config) -> Settings:
    """Return those settings of a config that belong to no class of the package. Their ranges are
    not checked here.

    Raises:
        ConfigError: a key is unknown, missing, or of another type. The message names it.
    """
    # For sections, only the names are checked here. Whoever reads a section checks its content.
    top = {name: {} if isinstance(value, Mapping) else value for name, value in config.items()}
    del top["choices"]  # ``to_config`` added this key, the chosen option of each config group
    check_section("", top, [TopLevel, Sections])
    client, server = config["client"], config["server"]
    model = {name: value for name, value in config["model"].items() if name != "network"}
    check_section("client", client, [ClientSettings, TrainingSettings])
    check_section("server", server, [ServerSettings])
    check_section("model", model, [ModelSettings])
    training = _take(TrainingSettings, client)
    return Settings(
        **_take(TopLevel, config),
        client=ClientSettings(**_take(ClientSettings, client)),
        schedule=checked("client", TrainingSettings(**training).schedule)(),
        server=ServerSettings(**server),
        model=ModelSettings(**model),
    )


def _take(kind: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a section whose keys are fields of the dataclass ``kind``."""
    return {field.name: section[field.name] for field in fields(kind) if field.name in section}
