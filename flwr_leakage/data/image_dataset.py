"""Hold labelled images together with their normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec


def check_range(what: str, numbers: Tensor, end: int) -> None:
    """Check that all entries of ``numbers`` lie in 0 … ``end`` − 1. ``what`` is their noun in the
    error.

    Raises:
        ValueError: an entry lies outside of the range.
    """
    outside = numbers[(numbers < 0) | (numbers >= end)]
    if len(outside):
        raise ValueError(f"{what} must lie in 0 … {end - 1}, got {outside.unique().tolist()[:5]}.")


def check_labels(name: str, labels: Tensor, count: int, num_classes: int) -> None:
    """Check that the labels of the dataset ``name`` are ``count`` int64 in 0 … ``num_classes`` − 1.

    Raises:
        ValueError: the labels have another shape or dtype, or a label lies outside of the range.
    """
    if labels.shape != (count,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels of {name} must be int64 ({count},), got {labels.dtype} {tuple(labels.shape)}."
        )
    check_range(f"labels of {name}", labels, num_classes)


@dataclass(frozen=True)
class ImageDataset:
    """N labelled images of K classes, held in memory as bytes.

    Attributes:
        name: the name of the dataset, for tables and records.
        images: (N, C, H, W) uint8.
        labels: (N,) int64, each in 0 … K − 1.
        class_names: the names of the K classes.
        mean: the mean per channel, of pixels in [0, 1]. Model inputs are (pixel − mean) / std.
        std: the standard deviation per channel, of pixels in [0, 1].

    Raises:
        ValueError: shapes or dtypes do not fit, or a label has no class name.
    """

    name: str
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise ValueError(
                f"images of {self.name} must be uint8 (N, C, H, W), got {self.images.dtype} "
                f"{tuple(self.images.shape)}."
            )
        check_labels(self.name, self.labels, len(self.images), len(self.class_names))
        _ = self.spec  # making the spec checks that mean and std fit the channels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def spec(self) -> InputSpec:
        """Return the shape, the number of classes and the normalisation of the images."""
        channels, height, width = self.images.shape[1:]
        return InputSpec(
            shape=(channels, height, width),
            num_classes=len(self.class_names),
            mean=self.mean,
            std=self.std,
        )

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Return the samples with the given indices as model inputs, normalised, in float32."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        pixels = self.images[chosen].float() / 255
        return Batch(self.spec.normalize(pixels), self.labels[chosen])


def dataset_from_arrays(
    name: str,
    images: NDArray,
    labels: ArrayLike,
    class_names: Sequence[str] | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> ImageDataset:
    """Return a dataset from NumPy arrays, in which the last axis of images is that of the channels.

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


def test_images(dataset: tuple[ImageDataset, ImageDataset], count: int) -> Batch:
    """Return the first test images of a dataset as model inputs (B, C, H, W) with labels (B,).

    Args:
        dataset: a training set and a test set.
        count: the number B of images; all are returned if there are fewer.
    """
    _, test = dataset
    return test.batch(range(min(count, len(test))))
