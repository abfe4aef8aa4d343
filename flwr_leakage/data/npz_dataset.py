"""Load images from NumPy archives."""

import os
from collections.abc import Sequence
from pathlib import Path

from numpy.typing import NDArray

from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays
from flwr_leakage.untrusted import read_npz


def npz_dataset(
    root: str | os.PathLike[str],
    name: str,
    mean: Sequence[float],
    std: Sequence[float],
    class_names: Sequence[str] | None = None,
) -> tuple[ImageDataset, ImageDataset]:
    """Load ``<root>/<name>_train.npz`` and ``<root>/<name>_test.npz``.

    Each file holds the arrays ``images``, uint8 (N, H, W) or (N, H, W, C), and ``labels``, N
    integers. Files are read without pickle, so that an untrusted file cannot run code.

    Args:
        root: the folder; ``~`` is expanded.
        name: the first part of both files' names.
        mean: the mean per channel, of pixels in [0, 1].
        std: the standard deviation per channel, of pixels in [0, 1].
        class_names: a name for each class; ``None`` for ``"0"``, ``"1"``, … up to the largest
            label.

    Returns:
        The training set and the test set.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no ``npz`` archive, lacks one of the arrays, or has arrays of other
            shapes or types.
    """
    if not name or Path(name).name != name:
        raise ValueError(f"name must be the first part of a file's name, got {name!r}.")
    arrays = {}
    for part in ("train", "test"):
        path = Path(root).expanduser() / f"{name}_{part}.npz"
        arrays[part] = (path, *_read_arrays(path))
    if class_names is None:
        # Both sets get the same class names, even if one of them lacks the largest label.
        largest = max(int(labels.max(initial=0)) for _, _, labels in arrays.values())
        class_names = [str(label) for label in range(largest + 1)]
    train, test = (
        dataset_from_arrays(str(path), images, labels, class_names, mean, std)
        for path, images, labels in arrays.values()
    )
    return train, test


def _read_arrays(path: Path) -> tuple[NDArray, NDArray]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; expected an .npz file with the arrays 'images' and 'labels'."
        )
    try:
        images, labels = read_npz(path, ["images", "labels"])
    except ValueError as error:
        raise ValueError(
            f"{path} must be an .npz file with the arrays 'images' and 'labels': {error}."
        ) from error
    return images, labels
