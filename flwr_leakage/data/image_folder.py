"""A folder of images with one subfolder a class."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.ImageOps import fit

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.data.arrays import dataset_from_arrays
from flwr_leakage.data.image_dataset import ImageDataset
from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.randomness import make_generator

# isort: split
from torchvision.datasets import ImageFolder


def image_folder(
    root: str | os.PathLike[str],
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    test_fraction: float = 0.2,
    seed: int = 0,
) -> tuple[ImageDataset, ImageDataset]:
    """Load ``<root>/<class>/<image>`` as RGB squares, all in memory.

    Each image is scaled (bicubic) and cropped around its centre to size × size.

    Args:
        root: the folder; ``~`` is expanded. Its subfolders name the classes.
        size: side of the images in pixels.
        mean: of the three channels, of pixels in [0, 1].
        std: likewise.
        test_fraction: share of each class that becomes the test set, in (0, 1).
        seed: the split is a pure function of it.

    Returns:
        The train and the test set.

    Raises:
        FileNotFoundError: no such folder, no class folder in it, or an empty class folder.
        ValueError: ``size`` smaller than 1, or ``test_fraction`` outside (0, 1).
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}.")
    folder = Path(root).expanduser()
    listing = ImageFolder(folder)
    labels = torch.tensor(listing.targets)
    images = np.stack([_load_square(path, size) for path, _ in listing.samples])
    splits = stratified_split(labels, test_fraction, make_generator(seed, purpose="image_folder"))
    train, test = (
        dataset_from_arrays(
            folder.name, images[split], labels[split].numpy(), listing.classes, mean, std
        )
        for split in splits
    )
    return train, test


def _load_square(path: str, size: int) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))
