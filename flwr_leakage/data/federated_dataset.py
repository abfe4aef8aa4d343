"""Divide a data set among clients, and draw the private batch of each client in each round."""

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
    """The training samples of several clients, and a common test set.

    Attributes:
        train: the samples of all clients.
        test: the server's test set.
        partitions: for each client, the indices of its samples in ``train``; a client may have
            none.
        seed: the seed of the random orders in which clients go through their samples.
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
        """Return the shapes, classes and normalisation of the samples."""
        return self.train.spec

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.partitions)

    def client_indices(self, client_id: int, server_round: int, num_examples: int) -> Tensor:
        """Return the indices in ``train`` of a client's samples in a round, (num_examples,) int64.

        They depend on the arguments and the seed alone. Clients are counted from 0, rounds from 1.
        A client with n samples goes through them in epochs of ⌊n / num_examples⌋ rounds. Each epoch
        has a random order of its own. So the rounds of an epoch have different samples, and no
        round holds a sample twice.

        Raises:
            ValueError: there is no such client or round, or the client has fewer than
                ``num_examples`` samples.
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
        """Return the private samples of a client in a round, as model inputs with targets.

        :meth:`client_indices` chooses the ``num_examples`` samples, and raises its errors.
        """
        return self.train.batch(self.client_indices(client_id, server_round, num_examples))

    def test_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the test set, or its first ``limit`` samples, in batches and in order.

        Raises:
            ValueError: ``batch_size`` or ``limit`` is smaller than 1.
        """
        if batch_size < 1 or (limit is not None and limit < 1):
            raise ValueError(
                f"batch_size and limit must be at least 1, got {batch_size} and {limit}."
            )
        count = len(self.test) if limit is None else min(limit, len(self.test))
        for start in range(0, count, batch_size):
            yield self.test.batch(torch.arange(start, min(start + batch_size, count)))
