"""What of the config belongs to no class of the package. Its defaults are in ``config.yaml``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientSettings:
    """The ``client`` section, beside the fields of ``LocalSchedule``.

    Attributes:
        num_examples: private samples that a client trains on in a round, ≥ 1.
        same_samples: the same ones in every round, rather than the next ones.
        max_samples: samples kept for scores and defenses, ≥ 1.
        num_threads: torch threads of a client, ≥ 1; ``None`` leaves them.
    """

    num_examples: int
    same_samples: bool
    max_samples: int
    num_threads: int | None


@dataclass(frozen=True)
class ServerSettings:
    """The ``server`` section.

    Attributes:
        attack_workers: processes that attack, ≥ 1.
        attack_chunk: targets attacked together in a process, ≥ 1.
        attack_folder: where finished chunks are kept, or ``None``.
        num_threads: torch threads of attacks and evaluation, ≥ 1; ``None`` leaves them.
        test_samples: of the global model's test accuracy, ≥ 1; ``None`` for the whole test set.
        wait_seconds: for a node for every client to connect, ≥ 0.
    """

    attack_workers: int
    attack_chunk: int
    attack_folder: str | None
    num_threads: int | None
    test_samples: int | None
    wait_seconds: float


@dataclass(frozen=True)
class Settings:
    """The top level of the config, beside the sections that name their targets.

    Attributes:
        seed: of every random draw, in [0, 2^63).
        num_clients: ≥ 1, each with a partition of the data.
        num_rounds: of training, ≥ 1.
        run_dir: where numbers, images, the config and the report go.
        client: the same for every client.
        server: of the server's process.
    """

    seed: int
    num_clients: int
    num_rounds: int
    run_dir: str
    client: ClientSettings
    server: ServerSettings
