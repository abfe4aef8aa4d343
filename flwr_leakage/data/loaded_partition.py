"""Use partitions of data that another library loads, such as flwr-datasets' partitioners."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays


@runtime_checkable
class Columns(Protocol):
    """The interface of a table by columns: a ``datasets.Dataset``, a dictionary of lists, …"""

    def __getitem__(self, key: str, /) -> Any:
        """Return the column of a name, with an entry for each row."""


@runtime_checkable
class LoadsPartitions(Protocol):
    """The interface of an object that loads a partition by its number.

    Partitioners of flwr-datasets are such objects.
    """

    def load_partition(self, partition_id: int, /) -> Columns:
        """Return the table of one client, by its number from 0."""


def dataset_from_columns(
    columns: Columns,
    name: str,
    mean: Sequence[float],
    std: Sequence[float],
    class_names: Sequence[str],
    image_column: str = "image",
    label_column: str = "label",
) -> ImageDataset:
    """Return a dataset of the image and label columns of a table.

    Args:
        columns: the table.
        name: the name of the dataset; errors mention it.
        mean: the mean per channel, of pixels in [0, 1].
        std: the standard deviation per channel, of pixels in [0, 1].
        class_names: the name of each class, in the order of labels.
        image_column: the name of the column of PIL images or uint8 arrays (H, W) or (H, W, C), all
            of the same shape.
        label_column: the name of the column of integer labels.

    Raises:
        ValueError: there are no rows, a column is missing, or the images differ in shape.
    """
    pixels = [np.asarray(image) for image in _column(columns, image_column, name)]
    labels = np.asarray(list(_column(columns, label_column, name)))
    if not pixels:
        raise ValueError(f"{name} must hold at least one image, got none.")
    shapes = {image.shape for image in pixels}
    if len(shapes) != 1:
        raise ValueError(f"images of {name} must have one shape, got {sorted(shapes)}.")
    return dataset_from_arrays(name, np.stack(pixels), labels, class_names, mean, std)


@dataclass(frozen=True)
class LoadedPartition:
    """A federation whose clients' data another library loads, by its method ``load_partition(i)``.

    With flwr-datasets (``pip install flwr-leakage[partition]``)::

        from flwr_datasets import FederatedDataset as Source
        from flwr_datasets.partitioner import DirichletPartitioner

        partitioner = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.5)
        source = Source(dataset="ylecun/mnist", partitioners={"train": partitioner})
        loaded = LoadedPartition(
            source, 10, name="mnist", mean=(0.1307,), std=(0.3081,), class_names=tuple("0123456789")
        )
        train, partitions = loaded.load()
        test = loaded.convert(source.load_split("test"))
        data = FederatedDataset(train, test, partitions, seed=0)

    In the place of ``source``, any partitioner of flwr-datasets whose ``dataset`` is set may be
    given.

    Attributes:
        partitioner: the object whose ``load_partition(i)`` returns the table of client i.
        num_partitions: the number of clients.
        name: the name of the dataset.
        mean: the mean per channel, of pixels in [0, 1].
        std: the standard deviation per channel, of pixels in [0, 1].
        class_names: the name of each class, in the order of labels.
        image_column: the name of the column of PIL images or uint8 arrays (H, W) or (H, W, C), all
            of the same shape.
        label_column: the name of the column of integer labels.
    """

    partitioner: LoadsPartitions
    num_partitions: int
    name: str
    mean: Sequence[float]
    std: Sequence[float]
    class_names: Sequence[str]
    image_column: str = "image"
    label_column: str = "label"

    def __post_init__(self) -> None:
        if self.num_partitions < 1:
            raise ValueError(f"num_partitions must be at least 1, got {self.num_partitions}.")

    def convert(self, columns: Columns) -> ImageDataset:
        """Return a dataset of a table with the image and label columns, such as a test set."""
        told = (self.name, self.mean, self.std, self.class_names)
        return dataset_from_columns(columns, *told, self.image_column, self.label_column)

    def load(self) -> tuple[ImageDataset, tuple[Tensor, ...]]:
        """Return all clients' samples as one dataset, and for each client its indices in it.

        A client without samples has no indices.

        Raises:
            ValueError: no client has samples, a column is missing, or images differ in shape.
        """
        tables = [self.partitioner.load_partition(index) for index in range(self.num_partitions)]
        images, labels = (
            [_column(table, column, self.name) for table in tables]
            for column in (self.image_column, self.label_column)
        )
        joined = {self.image_column: chain(*images), self.label_column: chain(*labels)}
        train = self.convert(joined)
        return train, torch.arange(len(train)).split([len(part) for part in labels])


def _column(table: Columns, column: str, name: str) -> Any:
    try:
        return table[column]
    except KeyError as error:
        raise ValueError(f"{name} must have the column {column!r}: {error}.") from error
