"""What every experiment is given: data, trained networks, LPIPS, a device, finished parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from flwr_leakage.data import ImageDataset, embedded_mnist, npz_dataset
from flwr_leakage.metrics import Lpips
from simulations.papers.data_digest import data_digests
from simulations.papers.findings import Row
from simulations.papers.parts import Parts, as_json
from simulations.papers.training import Recipe, Trained, trained

NORMALIZATION: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and standard deviation of the pixels of data sets in ``.npz`` files."""


@dataclass(frozen=True)
class Lab:
    """What an experiment works with.

    Attributes:
        name: of the experiment.
        size: ``smoke``, ``cpu``, ``thorough`` or ``paper``.
        cache: folder of trained networks; finished parts are in ``parts``.
        data_root: folder of the ``.npz`` files, or ``None``.
        lpips: the perceptual distance where its backbone is at hand, or ``None``.
        device: of training, attacks and scores.
        part: computes rows, or reads them back: ``lab.part(name, settings, compute)``.
        tell: is given lines about the progress.
    """

    name: str
    size: str
    cache: Path
    data_root: Path | None
    lpips: Lpips | None
    device: torch.device
    part: Parts
    tell: Callable[[str], None] = print

    def data(self, name: str) -> tuple[ImageDataset, ImageDataset]:
        """The train and the test set.

        Args:
            name: ``digits`` (embedded MNIST), or ``mnist``, ``fashion_mnist``, ``cifar10``,
                ``cifar100`` (``.npz`` files of ``data_root``). With ``/2`` after it, images are
                half as high and wide: means of 2×2 pixels.

        Raises:
            ValueError: no such name, or no folder of files.
        """
        if name.endswith("/2"):
            train, test = self.data(name.removesuffix("/2"))
            return _halved(train), _halved(test)
        if name == "digits":
            return embedded_mnist()
        if name not in NORMALIZATION:
            raise ValueError(f"data must be digits or one of {list(NORMALIZATION)}, got {name!r}.")
        if self.data_root is None:
            raise ValueError(
                f"data={name} needs the folder of {name}_train.npz and {name}_test.npz: "
                f"lab.data_root=FOLDER, got none."
            )
        return npz_dataset(self.data_root, name, *NORMALIZATION[name])

    def train(self, recipe: Recipe) -> Trained:
        """Train, or read back; the seconds count as a part of this experiment."""
        files = self._files(recipe.data)
        found = trained(recipe, self.data(recipe.data), files, self.cache, self.device, self.tell)
        self.part.count(
            recipe.digest(self.device, files),
            f"training {recipe.network} {recipe.seed}",
            found.cpu_seconds,
        )
        return found

    def trained(self, **recipe: Any) -> Mapping[int, nn.Module]:
        """Networks by epoch, the last included, in eval mode; arguments of ``Recipe``."""
        return self.train(Recipe(**recipe)).models

    def rows(
        self, name: str, settings: Mapping[str, Any], compute: Callable[[], list[Row]]
    ) -> list[Row]:
        """As ``part``, with device, presence of LPIPS and data files among the settings."""
        lpips = None if self.lpips is None else self.lpips.net
        around: dict[str, Any] = {"device": self.device.type, "lpips": lpips}
        if files := self._files(settings):
            around["data digest"] = files
        return self.part(name, {**settings, **around}, compute)

    def _files(self, settings: object) -> dict[str, str]:
        """Digests of the data files that settings name; see ``data_digests``."""
        return data_digests(as_json(settings), list(NORMALIZATION), self.data_root)


def _halved(dataset: ImageDataset) -> ImageDataset:
    small = avg_pool2d(dataset.images.float(), 2).round().to(torch.uint8)
    return replace(dataset, name=f"{dataset.name}/2", images=small)
