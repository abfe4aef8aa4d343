"""Make an ``ImageDataset`` from NumPy arrays with channels last, the layout of most files."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from flwr_leakage.data.image_dataset import ImageDataset


def dataset_from_arrays(
    name: str,
    images: NDArray,
    labels: ArrayLike,
    class_names: Sequence[str] | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> ImageDataset:
    """Return a dataset of uint8 images whose arrays have the channels last.

    Args:
        name: the name of the dataset; errors mention it.
        images: (N, H, W) or (N, H, W, C) uint8.
        labels: (N,) integers from 0 on.
        class_names: a name for each class; ``None`` for ``"0"``, ``"1"``, … up to the largest
            label.
        mean: the mean per channel, of pixels in [0, 1].
        std: the standard deviation per channel, of pixels in [0, 1].

    Raises:
        ValueError: the arrays have other dtypes or shapes, or hold no image.
    """
    labels = np.asarray(labels)
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"images of {name} must be uint8 (N, H, W) or (N, H, W, C), got {images.dtype} "
            f"{images.shape}."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels of {name} must be {len(images)} integers, got {labels.dtype} {labels.shape}."
        )
    if not len(labels):
        raise ValueError(f"{name} must hold at least one image, got none.")
    if class_names is None:
        class_names = [str(label) for label in range(int(labels.max()) + 1)]
    channels_last = images[..., None] if images.ndim == 3 else images
    channels_first = np.ascontiguousarray(channels_last.transpose(0, 3, 1, 2))
    return ImageDataset(
        name=name,
        images=torch.from_numpy(channels_first),
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=tuple(class_names),
        mean=tuple(mean),
        std=tuple(std),
    )
