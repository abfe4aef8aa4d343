"""The networks and images of I²F's experiments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flwr_leakage.models.initialization import Scheme
from flwr_leakage.records import Batch, InputSpec
from simulations.papers.lab import Lab
from simulations.papers.training import Recipe


@dataclass(frozen=True)
class Victim:
    """A network without training, and the data whose gradients it gives.

    LeNet's weights are drawn from U(−0.5, 0.5), those of others as torch draws them (Zhang et al.
    2023, appendix C.1). Networks with BatchNorm are in eval mode, as in the authors' code.

    Attributes:
        network: a class of ``flwr_leakage.models``.
        data: a name that ``Lab.data`` knows.
        initialization: how the weights are drawn; ``None`` as above.
        options: further arguments of the network.
    """

    network: str = "LeNet"
    data: str = "mnist"
    initialization: Scheme | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.network} {self.data}"

    def build(self, lab: Lab, seed: int) -> nn.Module:
        """The network with the weights of a seed."""
        scheme = self.initialization or ("uniform" if self.network == "LeNet" else "default")
        recipe = Recipe(
            self.network, self.data, 0, seed, options=dict(self.options), initialization=scheme
        )
        return recipe.build(lab.data(self.data)[0])


def test_images(lab: Lab, data: str, first: int, count: int) -> tuple[Batch, InputSpec]:
    """Successive test images as model inputs, and what is public about them."""
    test = lab.data(data)[1]
    return test.batch(list(range(first, first + count))), test.spec


def images_of_classes(lab: Lab, data: str, first: int, each: int) -> tuple[Batch, InputSpec]:
    """The first test images of each class from ``first`` on, class by class."""
    test = lab.data(data)[1]
    chosen = [
        first + int(place)
        for label in range(test.spec.num_classes)
        for place in torch.nonzero(test.labels[first:] == label)[:each, 0]
    ]
    return test.batch(chosen), test.spec
