"""Attack gradients of deep ReLU networks with this project's presets and with breaching.

    python -m simulations.benchmarks.attacks_deep --root FOLDER --network resnet18 \
        --methods breaching:invertinggradients,breaching:modern,feature_recursion --iterations 300

lays every method's schedule over 300 iterations (``feature_recursion`` has its own). With
``--seconds`` instead, a short trial measures what an iteration costs, and every method gets as
many as fit into those CPU seconds an image. It prints a Markdown table, and appends a JSON line
an image to ``--output``, so that methods may be run apart. One thread, one image at a time;
``--together`` attacks all images of one draw of weights in one call. With ``--seeds 100,101`` there
are several draws, and ``--images`` others for each. With ``--statistics dropout`` the client draws
masks of dropout, by the networks that have it. The folder holds ``cifar10_test.npz`` and
``cifar10_train.npz``; the methods of ``breaching`` need ``breaching==0.1.2`` (extra
``benchmark``).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import GradientInversion
from flwr_leakage.attacks.one_call import as_observation
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, ResNet8, ResNet18
from flwr_leakage.records import Batch, InputSpec, Observation
from simulations.benchmarks import lab
from simulations.benchmarks.attacks import Outcome, run_method


class Example(nn.Module):
    """Two convolutions, two linear layers, and dropout before each of these.

    With ``padding=0`` and one pooling it is the network of PyTorch's MNIST example; with two
    poolings it is as in many first steps with images.

    Args:
        shape: of the images.
        classes: number of classes.
        padding: of the convolutions.
        rates: p of the two dropouts.
        is_pooled: whether the first convolution is pooled, too.
    """

    def __init__(
        self,
        shape: lab.Shape,
        classes: int,
        padding: int = 0,
        rates: tuple[float, float] = (0.25, 0.5),
        is_pooled: bool = False,
    ) -> None:
        super().__init__()
        channels, size, _ = shape
        size = (size + 2 * padding - 2) // (2 if is_pooled else 1) + 2 * padding - 2
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=padding)
        self.pool = nn.MaxPool2d(2) if is_pooled else nn.Identity()
        self.dropout1, self.dropout2 = (nn.Dropout(rate) for rate in rates)
        self.fc1, self.fc2 = nn.Linear(64 * (size // 2) ** 2, 128), nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.dropout1(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))
        x = self.dropout2(F.relu(self.fc1(x)))
        return self.fc2(x)


def quickstart(shape: lab.Shape, classes: int) -> Example:
    """The network with two poolings, padding and one rate."""
    return Example(shape, classes, 1, (0.5, 0.5), True)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "convnet": ConvNet, "resnet8": ResNet8, "resnet18": ResNet18, "mnist-example": Example,
    "quickstart": quickstart,
}  # fmt: skip
TRIAL = 6  # iterations that measure an iteration's cost


def make_network(name: str, statistics: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """An untrained network in eval mode, or in train mode for ``dropout``.

    ``fresh`` running statistics are those that BatchNorm starts with, mean 0 and variance 1;
    ``calibrated`` ones the averages over 1,000 training images, in batches of 100.
    """
    torch.manual_seed(seed)
    network = NETWORKS[name](lab.SHAPE, lab.CLASSES)
    if statistics == "calibrated":
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # a plain average
        inputs = spec.normalize(lab.load(root, "train", 1000, 1000).inputs)
        with torch.no_grad():
            for batch in inputs.split(100):
                network.train()(batch)
    return network.train(statistics == "dropout")


def observe_dropped(network: nn.Module, samples: Batch) -> list[Observation]:
    """The gradient of every sample, each with masks of dropout of its own."""
    found = []
    for index in range(len(samples)):
        inputs, targets = samples.inputs[index : index + 1], samples.targets[index : index + 1]
        loss = F.cross_entropy(network(inputs), targets)
        gradient = torch.autograd.grad(loss, list(network.parameters()))
        gradient_map = GradientMap(network)
        found.append(as_observation(gradient_map, gradient, 1, None, None, index, ()))
    return found


Attacking = Callable[[Sequence[Observation], int], Outcome]
"""Attack targets in one call, with so many iterations each."""


def attacking(method: str, network: nn.Module, spec: InputSpec) -> Attacking:
    """A method with its schedule laid over so many iterations, if it takes a number of them."""
    takes = method.startswith("breaching:") or isinstance(load_preset(method), GradientInversion)
    return lambda targets, iterations: run_method(
        method, network, spec, targets, iterations if takes else 0, together=True
    )


def affordable(attack: Attacking, targets: Sequence[Observation], budget: float) -> int:
    """Iterations that fit into ``budget`` CPU seconds a target, by two short trials."""
    attack(targets, 1)  # the first call pays for what later ones reuse
    short, longer = (fmean(attack(targets, count).seconds) for count in (1, 1 + TRIAL))
    return max(1, round((budget - short) / ((longer - short) / TRIAL)))


@dataclass
class Rows:
    """What a method gave, an entry an image; ``iterations`` of the last draw of weights."""

    iterations: int = 0
    psnr: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def attack_draw(given: argparse.Namespace, seed: int, first: int, rows: dict[str, Rows]) -> None:
    """Attack images from ``first`` on with weights of a seed, and note the results in ``rows``."""
    spec = lab.CIFAR10
    images = lab.load(given.root, given.split, first, given.images)
    network = make_network(given.network, given.statistics, spec, given.root, seed)
    samples = lab.normalize(images, spec)
    if given.statistics == "dropout":
        targets = observe_dropped(network, samples)
    else:
        targets = lab.observe_each(GradientMap(network), samples)
    for method, row in rows.items():
        groups = [targets] if given.together else [[target] for target in targets]
        attack = attacking(method, network, spec)
        row.iterations = given.iterations or affordable(attack, groups[0], given.seconds)
        outcomes = [attack(group, row.iterations) for group in groups]
        found = [image for outcome in outcomes for image in outcome.found]
        seconds = [spent for outcome in outcomes for spent in outcome.seconds]
        for index, (image, spent) in enumerate(zip(found, seconds, strict=True)):
            row.psnr.append(lab.psnr(image, images.inputs[index : index + 1], spec))
            row.seconds.append(spent)
            if given.output is not None:
                line = {
                    **{k: str(v) for k, v in vars(given).items() if k not in ("root", "output")},
                    "method": method,
                    "seed": seed,
                    "image": first + index,
                    "iterations": row.iterations,
                    "psnr": row.psnr[-1],
                    "cpu_seconds": spent,
                }
                with given.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser, images=8)
    parser.add_argument("--seeds", help="several draws of weights, as in 100,101")
    parser.add_argument("--network", choices=list(NETWORKS), default="resnet18")
    parser.add_argument("--statistics", choices=["fresh", "calibrated", "dropout"], default="fresh")
    parser.add_argument("--methods", default="breaching:invertinggradients,feature_recursion")
    parser.add_argument("--seconds", type=float, default=53.0, help="CPU seconds an image")
    parser.add_argument("--iterations", type=int, default=0, help="instead of --seconds")
    parser.add_argument("--together", action="store_true", help="all targets in one call")
    parser.add_argument("--output", type=Path, help="JSON lines, appended")
    given = lab.start(parser)
    seeds = [int(seed) for seed in given.seeds.split(",")] if given.seeds else [given.seed]
    window = lab.describe_window(given.split, given.first, given.images * len(seeds))
    print(
        f"\n{given.network}, {given.statistics} statistics, {window}, {given.images} for each of "
        f"the weights of seed {', '.join(map(str, seeds))}, labels inferred, one thread, "
        f"{'together' if given.together else 'one by one'}.\n"
    )
    rows = {method: Rows() for method in given.methods.split(",")}
    for index, seed in enumerate(seeds):
        attack_draw(given, seed, given.first + index * given.images, rows)
    lab.print_header(
        *("method", "iterations", "CPU s", "most", "iterations / CPU s", "mean PSNR", "median"),
        *("worst", "≥ 100 dB", "≥ 60 dB"),
    )
    for method, row in rows.items():
        psnr, seconds = np.array(row.psnr), np.mean(row.seconds)
        lab.print_row(
            method,
            row.iterations,
            f"{seconds:.1f}",
            f"{np.max(row.seconds):.1f}",
            f"{row.iterations / seconds:.2f}",
            lab.spread(row.psnr, 1),
            f"{np.median(psnr):.1f}",
            f"{np.min(psnr):.1f}",
            *(f"{(psnr >= least).sum()} of {len(psnr)}" for least in (100, 60)),
        )


if __name__ == "__main__":
    main()
