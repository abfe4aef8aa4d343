"""Load a folder of images that has a subfolder for each class."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.ImageOps import fit

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays
from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.randomness import make_generator
from flwr_leakage.untrusted import MAX_PHOTO_PIXELS

# isort: split
from torchvision.datasets import ImageFolder


def image_folder(
    root: str | os.PathLike[str],
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    test_fraction: float | None = 0.2,
    seed: int = 0,
    train_folder: str = "train",
    test_folder: str = "val",
) -> tuple[ImageDataset, ImageDataset]:
    """Load ``<root>/<class>/<image>`` as RGB squares, all in memory.

    Each image is scaled (bicubic) and cropped around its centre to size × size. With
    ``test_fraction=None`` the folder has a training and a test folder, as those of ImageNette and
    ImageWoof: ``<root>/train/<class>/<image>`` and ``<root>/val/<class>/<image>``.

    Args:
        root: the folder; ``~`` is expanded. Its subfolders name the classes.
        size: the side of the images in pixels, ≥ 1.
        mean: the mean of the three channels, of pixels in [0, 1].
        std: the standard deviation of the three channels, of pixels in [0, 1].
        test_fraction: the share of each class that becomes the test set, in (0, 1); ``None`` if the
            folder has a training and a test folder.
        seed: the seed of the split.
        train_folder: the name of the training folder, if ``test_fraction`` is ``None``.
        test_folder: the name of the test folder, if ``test_fraction`` is ``None``.

    Returns:
        The training set and the test set.

    Raises:
        FileNotFoundError: there is no such folder, no class folder in it, or an empty class folder.
        ValueError: ``size`` is smaller than 1, ``test_fraction`` lies outside of (0, 1), the
            training and the test folder have different classes, or an image has more than
            ``MAX_PHOTO_PIXELS``.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}.")
    folder = Path(root).expanduser()
    if test_fraction is None:
        return _given_split(folder, (train_folder, test_folder), size, mean, std)
    whole = _loaded(ImageFolder(folder), folder.name, size, mean, std)
    generator = make_generator(seed, purpose="image_folder")
    train, test = stratified_split(whole.labels, test_fraction, generator)
    return (
        replace(whole, images=whole.images[train], labels=whole.labels[train]),
        replace(whole, images=whole.images[test], labels=whole.labels[test]),
    )


def _given_split(
    folder: Path, parts: tuple[str, str], size: int, mean: Sequence[float], std: Sequence[float]
) -> tuple[ImageDataset, ImageDataset]:
    for part in parts:
        if Path(part).name != part:
            raise ValueError(f"train_folder and test_folder must be names, got {part!r}.")
    listings = [ImageFolder(folder / part) for part in parts]
    if listings[0].classes != listings[1].classes:
        raise ValueError(
            f"{parts[0]} and {parts[1]} of {folder} must have the same classes, got "
            f"{listings[0].classes} and {listings[1].classes}."
        )
    train, test = (_loaded(listing, folder.name, size, mean, std) for listing in listings)
    return train, test


def _loaded(
    listing: ImageFolder, name: str, size: int, mean: Sequence[float], std: Sequence[float]
) -> ImageDataset:
    images = np.stack([_load_square(path, size) for path, _ in listing.samples])
    return dataset_from_arrays(name, images, listing.targets, listing.classes, mean, std)


def _load_square(path: str, size: int) -> np.ndarray:
    try:
        image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path}: {error}") from error
    with image:
        if image.width * image.height > MAX_PHOTO_PIXELS:
            raise ValueError(
                f"{path} must have at most {MAX_PHOTO_PIXELS:,} pixels, got "
                f"{image.width}×{image.height}."
            )
        return np.asarray(fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))
