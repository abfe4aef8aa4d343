"""Cases for attacks of every kind: networks, data, batches and what was done to the update.

A case is NETWORK/BATCH/SETTING, with /DATASET behind it if that is not CIFAR-10:

* a network of :data:`NETWORKS`, untrained, or ``-trained``: on 4,000 training images, until it
  tells test images apart better than :data:`LEARNT`, which is checked;
* samples in the update;
* ``clean``, ``noise-X`` (Gaussian, X of the update's norm), ``pruned-X`` (a share X of all entries)
  or ``steps-N`` (N local steps on the whole batch, learning rate 0.05);
* ``mnist`` or ``fashion_mnist``.

Images are averaged to half of their size (16×16, of MNIST 14×14), but for ``quickstart``, whose
layers fit 32×32 only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.models import MLP, LeNet, ResNet8, ResNet18, initialize
from flwr_leakage.records import Batch, InputSpec, Observation
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import Quickstart
from simulations.benchmarks.attacks_second_order import observe

SPECS = {
    "cifar10": lab.CIFAR10,
    "mnist": InputSpec((1, 28, 28), lab.CLASSES, (0.1307,), (0.3081,)),
    "fashion_mnist": InputSpec((1, 28, 28), lab.CLASSES, (0.2860,), (0.3530,)),
}

TRAINING_IMAGES, BATCH_SIZE = 4000, 64

LEARNT = 0.2
"""Accuracy on 500 test images that a trained network has at least; chance is 0.1."""

CASES = (
    "lenet/1/clean", "lenet/2/clean", "lenet/4/clean", "lenet/1/noise-1e-2", "lenet/1/pruned-0.9",
    "lenet/1/clean/mnist", "lenet/4/clean/fashion_mnist", "lenet-trained/1/clean", "tanh/1/clean",
    "tanh/2/clean", "tanh-trained/1/noise-1e-2", "relu/1/clean", "relu/2/clean",
    "relu/1/noise-1e-2", "relu/1/pruned-0.9", "relu/1/steps-3", "relu-trained/1/clean",
    "mlp/1/clean", "mlp/4/clean", "mlp/8/clean/mnist", "mlp/4/noise-1e-3", "mlp/1/pruned-0.9",
    "mlp/2/steps-3/fashion_mnist", "pool/1/clean", "pool/1/noise-1e-2",
    "pool-trained/1/clean/fashion_mnist", "resnet8-trained/1/clean", "resnet18-trained/1/clean",
    "quickstart-trained/1/clean", "lenet/8/clean",
)  # fmt: skip

MORE = (
    "quickstart/1/clean", "quickstart/4/clean", "quickstart/32/clean",
    "quickstart-trained/4/clean", "quickstart-trained/32/clean",
)  # fmt: skip
"""Batches of the network that Flower's quickstart trains."""


@dataclass(frozen=True)
class Target:
    """One update to attack, and the truth behind it, which no attack sees.

    Attributes:
        network: in eval mode.
        spec: of its inputs.
        pixels: private images and labels.
        seen: what the server saw.
    """

    network: nn.Module
    spec: InputSpec
    pixels: Batch
    seen: Observation


class Functional(nn.Module):
    """A small CNN as tutorials write it: functions and ``view``, max pooling."""

    def __init__(self, shape: lab.Shape) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * (shape[1] // 4) * (shape[2] // 4), lab.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.view(x.size(0), -1))


def _lenet(shape: lab.Shape) -> nn.Module:
    network = LeNet(shape, lab.CLASSES, num_convolutions=3)
    return initialize(network, "uniform", lab.generator(torch.initial_seed()))


NETWORKS: dict[str, Callable[[lab.Shape], nn.Module]] = {
    "lenet": _lenet,
    "tanh": lambda shape: LeNet(shape, lab.CLASSES, num_convolutions=3, activation="tanh"),
    "relu": lab.small_convnet,
    "mlp": lambda shape: MLP(shape, lab.CLASSES, (256, 256)),
    "pool": Functional,
    "quickstart": lambda shape: Quickstart(),
    "resnet8": lambda shape: ResNet8(shape, lab.CLASSES, width=16),
    "resnet18": lambda shape: ResNet18(shape, lab.CLASSES, width=16),
}
"""Networks of images of a shape; ``lenet``, ``tanh``, ``resnet8`` and ``resnet18`` learn by Adam
(0.003), the others by SGD (0.05, momentum 0.9)."""

ADAM = ("lenet", "tanh", "resnet8", "resnet18")


def load(
    root: Path, split: str, first: int, count: int, factor: int = 1, dataset: str = "cifar10"
) -> Batch:
    """Images averaged over squares of ``factor`` pixels a side."""
    pixels = lab.read_images(root / f"{dataset}_{split}.npz", first, count)
    inputs = F.avg_pool2d(pixels.inputs, factor)
    return Batch(inputs.clone(memory_format=torch.contiguous_format), pixels.targets)


def trained(
    kind: str, network: nn.Module, images: Batch, test: Batch, epochs: Sequence[int] = (3, 6, 12)
) -> nn.Module:
    """The network after three epochs; after more, where it has not learnt by then.

    Raises:
        RuntimeError: it has not learnt after the last number of epochs.
    """
    if kind in ADAM:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    else:
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    accuracy = 0.0
    for begin, end in zip((0, *epochs), epochs, strict=False):
        network.train()
        for _ in range(begin, end):
            lab.train(network, optimizer, lab.shuffled(images, BATCH_SIZE))
        network.eval()
        with torch.no_grad():
            right = network(test.inputs).argmax(1) == test.targets
        accuracy = float(right.float().mean())
        if accuracy >= LEARNT:
            return network
    raise RuntimeError(f"{kind} must learn to at least {LEARNT:.0%}, got {accuracy:.0%}.")


def make_target(case: str, root: Path, split: str, first: int, seed: int) -> Target:
    """The network of a case, and an update of images from ``first`` on."""
    name, count, setting, *rest = case.split("/")
    dataset = rest[0] if rest else "cifar10"
    kind, _, is_trained = name.partition("-")
    factor = 1 if kind == "quickstart" else 2
    spec = SPECS[dataset]
    channels, height, width = spec.shape
    spec = replace(spec, shape=(channels, height // factor, width // factor))
    torch.manual_seed(seed)  # layers draw their weights from the global stream
    network = NETWORKS[kind](spec.shape)
    if is_trained:
        images = lab.normalize(load(root, "train", 0, TRAINING_IMAGES, factor, dataset), spec)
        test = lab.normalize(load(root, "test", 0, 500, factor, dataset), spec)
        network = trained(kind, network, images, test)
    pixels = load(root, split, first, int(count), factor, dataset)
    seen, _ = observe(network.eval(), lab.normalize(pixels, spec), setting, first, seed)
    return Target(network, spec, pixels, seen)
