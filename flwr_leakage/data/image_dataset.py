"""Labelled images with the normalisation that belongs to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec


@dataclass(frozen=True)
class ImageDataset:
    """N labelled images, held in memory as bytes.

    Attributes:
        name: the name for tables and records.
        images: (N, C, H, W) uint8.
        labels: (N,) int64, each in 0 … K − 1.
        class_names: K names.
        mean: the mean per channel, of pixels in [0, 1], with which the model's inputs are
            normalised.
        std: the standard deviation per channel, likewise.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a label without a class name.
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
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels of {self.name} must be int64 ({len(self.images)},), got "
                f"{self.labels.dtype} {tuple(self.labels.shape)}."
            )
        outside = self.labels[(self.labels < 0) | (self.labels >= len(self.class_names))]
        if len(outside):
            raise ValueError(
                f"labels of {self.name} must lie in 0 … {len(self.class_names) - 1}, "
                f"got {outside.unique().tolist()[:5]}."
            )
        _ = self.spec  # this checks mean and std against the channels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def spec(self) -> InputSpec:
        """Return the public facts on the data: shape, number of classes, normalisation."""
        channels, height, width = self.images.shape[1:]
        return InputSpec(
            shape=(channels, height, width),
            num_classes=len(self.class_names),
            mean=self.mean,
            std=self.std,
        )

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Return the chosen samples, normalised, in float32."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        pixels = self.images[chosen].float() / 255
        return Batch(self.spec.normalize(pixels), self.labels[chosen])


def test_images(dataset: tuple[ImageDataset, ImageDataset], count: int) -> Batch:
    """Return the first test images, normalised, or all where there are fewer.

    Args:
        dataset: a train and a test set.
        count: the number of images.
    """
    _, test = dataset
    return test.batch(range(min(count, len(test))))
