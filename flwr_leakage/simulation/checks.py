"""Check, before an experiment runs, that its settings lie in their ranges and fit each other.

Each object checks its own settings when it is made. The checks here concern settings of several
objects, or of none.
"""

import math
from operator import attrgetter

from flwr_leakage.comparison import MEASURES
from flwr_leakage.flower.client_audit import check_limits
from flwr_leakage.members import OwnRecords
from flwr_leakage.randomness import Reproducible
from flwr_leakage.scores import PSNRBound
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.nodes import checked
from flwr_leakage.simulation.settings import Settings
from flwr_leakage.simulation.strategies import check_strategy

COUNTS = (
    "num_clients",
    "num_rounds",
    "client.num_examples",
    "client.max_samples",
    "client.num_threads",
    "server.attack_workers",
    "server.attack_chunk",
    "server.kept_bytes",
    "server.num_threads",
    "server.test_samples",
    "server.weights_every",
)
"""The keys whose values must be at least 1, or null where that is allowed."""


def check_settings(settings: Settings) -> None:
    """Check the ranges of those settings that no class checks itself.

    Raises:
        ConfigError: a setting is out of its range. The message names the key.
    """
    for key in COUNTS:
        value = attrgetter(key)(settings)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{key} must be at least 1, got {value}.")
    if not 0 <= settings.seed < 2**63:
        raise ConfigError(f"seed must lie in [0, 2^63), got {settings.seed}.")
    for key in ("server.attack_max_seconds", "server.what_if_max_seconds"):
        limit = attrgetter(key)(settings)
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{key} must be positive or null, got {limit}.")
    known = [measure.name for measure in MEASURES]
    named = settings.objective
    for name in [named] if isinstance(named, str) else named or []:
        if name not in known:
            raise ConfigError(f"objective must be among {known}, got {name!r}.")
    wait = settings.server.wait_seconds
    if not 0 <= wait < math.inf:
        raise ConfigError(f"server.wait_seconds must be finite and ≥ 0, got {wait}.")


def check_experiment(experiment: Experiment) -> None:
    """Check that data, clients, threat model, defense and strategy of an experiment fit each other.

    Raises:
        ConfigError: some of them do not fit each other. The message names the key.
    """
    check_texts(experiment)
    checked("gate.scores", check_limits)(experiment.gate, experiment.scores)
    check_clients(experiment)
    check_threat(experiment)
    check_defense(experiment)
    check_strategy(experiment.strategy(), experiment.settings.num_clients)
    checked("client", experiment.client_audit)()


def check_texts(experiment: Experiment) -> None:
    """Raise ``ConfigError`` if inputs are texts, but a score is for images, or the gate (the limits
    beyond which a client withholds its update) uses an attack on images.
    """
    if not experiment.spec.is_text:
        return
    for name, score in experiment.scores.items():
        if isinstance(score, PSNRBound):
            raise ConfigError(
                f"score.{name} must be no score of pixels: {type(score).__name__} bounds PSNR, and "
                "the embeddings of tokens have none. All other scores take embeddings."
            )
        if isinstance(score, OwnRecords):
            raise ConfigError(
                f"score.{name} must not be OwnRecords, which tests images on the client; "
                "membership=drawn tests texts on the server."
            )
    if experiment.gate is not None and experiment.gate.needs_attack:
        raise ConfigError(
            "gate must limit scores only: PSNR and the grades of a self-attack are those of "
            "images, got texts."
        )


def check_clients(experiment: Experiment) -> None:
    """Check that every client has enough samples, and that the clients to attack exist.

    Raises:
        ConfigError: a client has no sample, or fewer than ``client.num_examples``; or
            ``selection.clients`` names a client that does not exist. The message names the key.
    """
    given = experiment.settings.client.num_examples
    sizes = [len(part) for part in experiment.data.partitions]
    smallest = min(sizes)
    if not smallest:
        raise ConfigError(
            f"partition must give every client a sample, got none for client "
            f"{sizes.index(smallest)}."
        )
    if given is not None and given > smallest:
        raise ConfigError(
            f"client.num_examples must be at most {smallest}, the samples that the partition "
            f"gives client {sizes.index(smallest)}, got {given}. Take client.num_examples=null "
            f"for all that each has, or partition=iid for equal shares."
        )
    chosen = experiment.selection.clients
    if chosen is not None and not (chosen and set(chosen) <= set(range(len(sizes)))):
        raise ConfigError(
            f"selection.clients must name some of the clients 0 … {len(sizes) - 1}, or be null "
            f"for all, got {list(chosen)}."
        )


def check_threat(experiment: Experiment) -> None:
    """Check that the facts which the threat model grants exist in this experiment.

    BatchNorm statistics, for example, do not exist in a model without BatchNorm.

    Raises:
        ConfigError: such a fact does not exist. The message names the key.
    """
    threat, client = experiment.threat, experiment.settings.client
    if threat.batch_norm != "none":
        if not experiment.gradient_map.has_batch_norm:
            raise ConfigError(
                "threat.batch_norm must be none for a model without BatchNorm, "
                f"got {threat.batch_norm}."
            )
        if experiment.gradient_map.batch_norm == "running":
            raise ConfigError(
                "threat.batch_norm must be none where model.batch_norm=running, as no client "
                f"normalises with statistics of its own, got {threat.batch_norm}."
            )
    if threat.batch_norm == "final" and (
        threat.view == "aggregate" or not experiment.settings.server.attack_later
    ):
        raise ConfigError(
            "threat.batch_norm=final takes server.attack_later=true and threat.view=single, as the "
            "statistics are those of the finished model, got server.attack_later="
            f"{experiment.settings.server.attack_later} and threat.view={threat.view}."
        )
    steps = {experiment.schedule.for_client(size).num_steps for size in experiment.sizes}
    if threat.view == "aggregate" and len(steps) > 1:
        raise ConfigError(
            "threat.view must be single where clients take different numbers of steps, got "
            f"aggregate and {min(steps)} to {max(steps)} steps; set client.num_steps."
        )
    check_mixing(experiment)
    if threat.rounds == 1:
        return
    if not client.same_samples:
        raise ConfigError(
            "threat.rounds must be 1 unless client.same_samples=true, as it explains all rounds "
            f"by the same samples, got {threat.rounds}."
        )
    batch_size = experiment.schedule.batch_size
    largest = max(experiment.sizes)
    if batch_size < largest:
        raise ConfigError(
            "threat.rounds must be 1 unless every step takes all of a client's samples, got "
            f"{threat.rounds} with client.batch_size={batch_size} and "
            f"client.num_examples={largest}."
        )
    if experiment.defense.encodes_batches:
        raise ConfigError(
            "threat.rounds must be 1 with a defense that encodes batches, as each round then "
            f"trains on other samples, got {threat.rounds}."
        )


def check_mixing(experiment: Experiment) -> None:
    """Check that a mixing which the threat model grants exists: the defense mixes private samples,
    the same in each round.

    The mixing of MixUp or InstaHide consists of the weights of private samples in the sums that a
    client trains on.

    Raises:
        ConfigError: the defense mixes no private samples, or other ones in each round.
    """
    if experiment.threat.mixing == "unknown":
        return
    fewest = min(experiment.sizes)
    draws = Reproducible.from_seed(experiment.settings.seed)
    matrix = checked("defense", experiment.defense.mixing_matrix)(fewest, draws)
    if matrix is None or matrix.shape[1] != fewest:
        raise ConfigError(
            "threat.mixing must be unknown unless the defense mixes private samples with one "
            f"another, got known and {type(experiment.defense).__name__}."
        )
    if not experiment.settings.client.same_samples:
        raise ConfigError(
            "threat.mixing must be unknown unless client.same_samples=true, as the encodings of "
            "several rounds are decoded together, got known."
        )


def check_defense(experiment: Experiment) -> None:
    """Check that the defenses can work on these samples, this network and this number of rounds.

    Raises:
        ConfigError: a defense cannot work with them. The message names the key.
    """
    settings, defense = experiment.settings, experiment.defense
    used = [experiment.schedule.for_client(n).num_samples_used(n) for n in experiment.sizes]
    fewest = min(used)
    others = {f"what_if.{name}": other for name, other in experiment.what_ifs.items()}
    for key, each in {"defense": defense, **others}.items():
        checked(key, each.validate)(experiment.gradient_map, experiment.spec, fewest)
        for size in set(experiment.sizes):
            schedule = experiment.schedule.for_client(size)
            checked(key, each.epsilon)(schedule, size, settings.num_rounds, "replace-one")
    if defense.replaces_update and settings.client.max_samples < max(used):
        raise ConfigError(
            f"client.max_samples must be at least {max(used)}, the samples of a round, as the "
            f"defense replays the training on all of them; got {settings.client.max_samples}."
        )
