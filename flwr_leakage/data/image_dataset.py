"""Hold labelled images together with their normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec


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


def test_images(dataset: tuple[ImageDataset, ImageDataset], count: int) -> Batch:
    """Return the first test images of a dataset as model inputs (B, C, H, W) with labels (B,).

    Args:
        dataset: a training set and a test set.
        count: the number B of images; all are returned if there are fewer.
    """
    _, test = dataset
    return test.batch(range(min(count, len(test))))
