"""Load MNIST, FashionMNIST and CIFAR by torchvision, which downloads them if it is told to."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays

# isort: split
from torchvision import datasets

_DATASETS = {
    "MNIST": datasets.MNIST,
    "FashionMNIST": datasets.FashionMNIST,
    "CIFAR10": datasets.CIFAR10,
    "CIFAR100": datasets.CIFAR100,
}


def torchvision_dataset(
    name: str,
    root: str | os.PathLike[str],
    mean: Sequence[float],
    std: Sequence[float],
    download: bool = False,
) -> tuple[ImageDataset, ImageDataset]:
    """Load MNIST, FashionMNIST, CIFAR10 or CIFAR100 in torchvision's file layout.

    Args:
        name: the name of torchvision's class: MNIST, FashionMNIST, CIFAR10 or CIFAR100.
        root: the folder that holds, or will hold, torchvision's files; ``~`` is expanded.
        mean: the mean per channel, of pixels in [0, 1].
        std: the standard deviation per channel, of pixels in [0, 1].
        download: whether torchvision may fetch missing files.

    Returns:
        The training set and the test set.

    Raises:
        ValueError: the name is unknown.
        FileNotFoundError: the files do not exist and ``download`` is false.
    """
    if name not in _DATASETS:
        raise ValueError(f"name must be one of {sorted(_DATASETS)}, got {name!r}.")
    folder = Path(root).expanduser()
    parts = []
    for train in (True, False):
        try:
            source = _DATASETS[name](folder, train=train, download=download)
        except RuntimeError as error:
            if download:
                raise
            raise FileNotFoundError(
                f"{name} was not found in {folder} ({error}). Set download=true to fetch it."
            ) from error
        images, labels = np.asarray(source.data, dtype=np.uint8), np.asarray(source.targets)
        classes = list(map(str, source.classes))
        parts.append(dataset_from_arrays(name, images, labels, classes, mean, std))
    return parts[0], parts[1]
