"""A data set divided among clients, and the private batch of each client in each round."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.data.image_dataset import ImageDataset
from flwr_leakage.data.text_dataset import TextDataset
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec


@dataclass(frozen=True)
class FederatedDataset:
    """Train samples by client, and a common test set.

    Attributes:
        train: the samples of all clients.
        test: the server's test set.
        partitions: the indices in ``train`` of each client; a client may be empty.
        seed: the seed of the experiment; the clients' batches are a pure function of it.
    """

    train: ImageDataset | TextDataset
    test: ImageDataset | TextDataset
    partitions: tuple[Tensor, ...]
    seed: int

    def __post_init__(self) -> None:
        if self.train.spec != self.test.spec:
            raise ValueError(
                f"train and test must have the same shape, classes and normalisation, got "
                f"{self.train.spec} and {self.test.spec}."
            )
        for client_id, indices in enumerate(self.partitions):
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.train):
                raise ValueError(
                    f"indices of client {client_id} must lie in 0 … {len(self.train) - 1}, got "
                    f"{int(indices.min())} … {int(indices.max())}."
                )

    @property
    def spec(self) -> InputSpec:
        """Return the public facts on the data."""
        return self.train.spec

    @property
    def num_clients(self) -> int:
        """Return the number of partitions."""
        return len(self.partitions)

    def client_indices(self, client_id: int, server_round: int, num_examples: int) -> Tensor:
        """Return indices in ``train`` of a client's samples in a round, a function of the seed
        alone.

        A client with n samples goes through them in epochs of ⌊n / num_examples⌋ rounds. Each
        epoch has its own random order, so that rounds see different samples, and a round never
        holds a sample twice.

        Args:
            client_id: the partition, from 0.
            server_round: counted from 1.
            num_examples: samples in a round.

        Raises:
            ValueError: no such client or round, or the client has fewer samples.
        """
        if not 0 <= client_id < self.num_clients:
            raise ValueError(f"client_id must lie in 0 … {self.num_clients - 1}, got {client_id}.")
        if server_round < 1:
            raise ValueError(f"server_round must be at least 1, got {server_round}.")
        partition = self.partitions[client_id]
        if not 1 <= num_examples <= len(partition):
            raise ValueError(
                f"num_examples must lie in 1 … {len(partition)}, the number of samples of client "
                f"{client_id}, got {num_examples}."
                if len(partition)
                else f"client {client_id} has no samples, but num_examples is {num_examples}."
            )
        epoch, slot = divmod(server_round - 1, len(partition) // num_examples)
        generator = make_generator(
            self.seed, server_round=epoch, client_id=client_id, purpose="batch"
        )
        order = torch.randperm(len(partition), generator=generator)
        return partition[order[slot * num_examples : (slot + 1) * num_examples]]

    def client_batch(self, client_id: int, server_round: int, num_examples: int) -> Batch:
        """Return the private batch of a client in a round; see ``client_indices``."""
        return self.train.batch(self.client_indices(client_id, server_round, num_examples))

    def test_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the test set, or its first ``limit`` samples, in order.

        Raises:
            ValueError: ``batch_size`` or ``limit`` smaller than 1.
        """
        if batch_size < 1 or (limit is not None and limit < 1):
            raise ValueError(
                f"batch_size and limit must be at least 1, got {batch_size} and {limit}."
            )
        count = len(self.test) if limit is None else min(limit, len(self.test))
        for start in range(0, count, batch_size):
            yield self.test.batch(torch.arange(start, min(start + batch_size, count)))
