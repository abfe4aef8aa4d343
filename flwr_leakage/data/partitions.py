"""Divide the samples of a data set among clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class Partition(Protocol):
    """The interface of a function that divides the samples of a data set among clients."""

    def __call__(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return, for each client, the indices of its samples.

        ``labels`` (N,) int64 are the classes of the N samples; ``generator`` makes all draws.
        """
        ...


def _check_partitions(num_partitions: int, num_examples: int, min_samples: int) -> None:
    if num_partitions < 1:
        raise ValueError(f"num_partitions must be at least 1, got {num_partitions}.")
    if num_partitions * min_samples > num_examples:
        raise ValueError(
            f"{num_partitions} partitions of at least {min_samples} samples need "
            f"{num_partitions * min_samples} samples, got {num_examples}."
        )


@dataclass(frozen=True)
class IidPartition:
    """A partition that deals the samples at random to clients whose sizes differ by at most one.

    Attributes:
        num_partitions: the number of clients, ≥ 1.
    """

    num_partitions: int

    def __call__(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return, for each client, the indices of its samples.

        Of ``labels`` (N,) only the number N is used; ``generator`` shuffles the samples.

        Raises:
            ValueError: there are fewer samples than clients.
        """
        _check_partitions(self.num_partitions, len(labels), min_samples=1)
        order = torch.randperm(len(labels), generator=generator)
        return list(order.tensor_split(self.num_partitions))


DEFAULT_SIZES = (1, 4, 30, 120, 400, 800, 1200)
"""The numbers of samples of the clients of a ``SizedPartition`` whose ``sizes`` are ``None``."""


@dataclass(frozen=True)
class SizedPartition:
    """A partition into clients of given sizes, such as a few with many samples and many with few.

    Samples are drawn without replacement; some may belong to no client.

    Attributes:
        num_partitions: the number of clients, ≥ 1.
        sizes: the number of samples of each client, ≥ 1; ``None`` takes the numbers of
            ``DEFAULT_SIZES`` in turn, and begins again with the first one if there are more clients
            than numbers.
    """

    num_partitions: int
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is None:
            return
        if len(self.sizes) != self.num_partitions:
            raise ValueError(
                f"sizes must hold one size for each of {self.num_partitions} clients, got "
                f"{len(self.sizes)}: {list(self.sizes)}."
            )
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes must be numbers of at least 1, got {list(self.sizes)}.")

    def __call__(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return, for each client, the indices of its samples.

        Of ``labels`` (N,) only the number N is used; ``generator`` shuffles the samples.

        Raises:
            ValueError: the sizes add up to more than N.
        """
        _check_partitions(self.num_partitions, len(labels), min_samples=1)
        repeated = [DEFAULT_SIZES[i % len(DEFAULT_SIZES)] for i in range(self.num_partitions)]
        sizes = repeated if self.sizes is None else list(self.sizes)
        if sum(sizes) > len(labels):
            raise ValueError(
                f"sizes must add up to at most {len(labels)}, the samples that there are, got "
                f"{sum(sizes)} for {self.num_partitions} clients of sizes {sizes}."
            )
        order = torch.randperm(len(labels), generator=generator)[: sum(sizes)]
        return list(order.split(sizes))


@dataclass(frozen=True)
class DirichletSizePartition:
    """A partition into clients of random sizes: their shares of all samples follow Dir(α, …, α).

    Small α gives few clients most of the samples; α → ∞ gives equal shares ("quantity skew", Li et
    al. 2022, Section 4.4). Labels are distributed at random; ``DirichletPartition`` skews both
    sizes and labels.

    Attributes:
        num_partitions: the number of clients, ≥ 1.
        alpha: the concentration α > 0.
        min_samples: the least number of samples of a client, ≥ 1. Each client gets this number
            before the other samples are divided.
    """

    num_partitions: int
    alpha: float
    min_samples: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}.")
        if self.min_samples < 1:
            raise ValueError(f"min_samples must be at least 1, got {self.min_samples}.")

    def __call__(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return, for each client, the indices of its samples; every sample belongs to a client.

        Of ``labels`` (N,) only the number N is used; ``generator`` draws the shares and the order.

        Raises:
            ValueError: N is smaller than ``num_partitions`` · ``min_samples``.
        """
        _check_partitions(self.num_partitions, len(labels), self.min_samples)
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        shares = random.dirichlet([self.alpha] * self.num_partitions)
        rest = len(labels) - self.num_partitions * self.min_samples
        ends = np.rint(np.cumsum(shares) * rest).astype(np.int64)
        ends[-1] = rest
        sizes = np.diff(ends, prepend=0) + self.min_samples
        order = torch.randperm(len(labels), generator=generator)
        return list(order.split(sizes.tolist()))


MAX_DRAWS = 1000
"""The number of draws of a ``DirichletPartition`` after which an error is raised."""


@dataclass(frozen=True)
class DirichletPartition:
    """A partition with label skew: the clients' shares of each class follow Dir(α, …, α).

    For each class k, ``p_k ~ Dir(α, …, α)`` is drawn over the clients, and client i receives a
    share p_ki of the class (Yurochkin et al. 2019; Li et al. 2022, Section 4.2). Small α gives each
    client few classes; α → ∞ gives equal shares of all. If a client has fewer than ``min_samples``,
    the shares of all classes are drawn again.

    Attributes:
        num_partitions: the number of clients, ≥ 1.
        alpha: the concentration α > 0.
        min_samples: the least number of samples of a client, ≥ 0; 0 allows empty clients.
    """

    num_partitions: int
    alpha: float
    min_samples: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha}.")
        if self.min_samples < 0:
            raise ValueError(f"min_samples must be ≥ 0, got {self.min_samples}.")

    def __call__(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return, for each client, the indices of its samples in random order.

        ``labels`` (N,) int64 are the classes of the samples; ``generator`` makes all draws.

        Raises:
            ValueError: none of ``MAX_DRAWS`` draws gave every client ``min_samples``.
        """
        _check_partitions(self.num_partitions, len(labels), self.min_samples)
        # torch offers no Dirichlet distribution that draws from a given generator, so that NumPy
        # draws.
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        classes = labels.unique(sorted=True)
        members = [(labels == label).nonzero().squeeze(1) for label in classes]
        for _ in range(MAX_DRAWS):
            shares = random.dirichlet([self.alpha] * self.num_partitions, size=len(classes))
            ends = np.cumsum(shares, 1)[:, :-1] * np.array([[len(m)] for m in members])
            cuts = np.rint(ends).astype(np.int64)
            edges = np.pad(cuts, ((0, 0), (1, 1)))
            edges[:, -1] = [len(m) for m in members]
            if np.diff(edges, axis=1).sum(0).min() >= self.min_samples:
                return _deal(members, cuts, generator)
        raise ValueError(
            f"no draw of {MAX_DRAWS} with alpha={self.alpha} gave each of "
            f"{self.num_partitions} partitions {self.min_samples} samples of {len(labels)}; "
            f"raise alpha, or lower min_samples or num_partitions."
        )


def _deal(members: list[Tensor], cuts: np.ndarray, generator: torch.Generator) -> list[Tensor]:
    pieces = [
        indices[torch.randperm(len(indices), generator=generator)].tensor_split(cut.tolist())
        for indices, cut in zip(members, cuts, strict=True)
    ]
    partitions = [torch.cat(client) for client in zip(*pieces, strict=True)]
    return [part[torch.randperm(len(part), generator=generator)] for part in partitions]
