"""Whole batches, exactly: how many samples of a batch are recovered, and how many with proof.

    python -m simulations.benchmarks.attacks_batches --root FOLDER

prints a Markdown table. FOLDER holds ``NAME_train.npz`` and ``NAME_test.npz`` (``images`` uint8,
``labels``) of ``cifar10``, ``mnist`` and ``fashion_mnist``. Networks and batches have seeds from
``--first-seed`` on; batches are of test images from number 100 on, networks are trained on
training images. Labels are inferred, nothing but the update is known. ``--cases`` chooses rows by
a part of their name. One thread.

An image is exact above 60 dB, with its label; features within a relative error of 1e-3. Proven
samples that are not exact are counted as wrongly proven.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, ExactBatch
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)

SHAPES = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28)}
TRAINING = 4000  # images of the training split that networks are trained on
UNSEEN = 100  # the first test image that a batch may hold
EXACT_DB, EXACT_FEATURES = 60.0, 1e-3


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: of the row.
        network: input specification ↦ network.
        dataset: its name.
        batch_size: B.
        epochs: of training, one for each draw.
        learning_rate: of the update, by the arithmetic of the wire (float32 parameters before and
            after); 0 for the gradient itself.
        steps: local steps, each on all samples.
        double: gradients in float64.
        pixels: inputs in [0, 1] instead of [−1, 1].
        classes: K; where they are not the data's ten, labels are drawn at random.
    """

    name: str
    network: Callable[[InputSpec], nn.Module]
    dataset: str
    batch_size: int
    epochs: Sequence[int] = (0,) * 5
    learning_rate: float = 0.0
    steps: int = 1
    double: bool = False
    pixels: bool = False
    classes: int = 10


def mlp(*widths: int) -> Callable[[InputSpec], nn.Module]:
    """Linear layers with ReLU, PyTorch's initialisation."""

    def make(spec: InputSpec) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = torch.Size(spec.shape).numel()
        for width in widths:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        return nn.Sequential(*layers, nn.Linear(inputs, spec.num_classes))

    return make


def cascading(spec: InputSpec) -> nn.Module:
    """Two layers of Shariati and Alambardar 2026: N = 1000, W₁ ~ N(0, 0.5²), no offset."""
    network = mlp(1000)(spec)
    assert isinstance(network, nn.Sequential) and isinstance(network[1], nn.Linear)
    nn.init.normal_(network[1].weight, 0, 0.5)
    nn.init.zeros_(network[1].bias)
    return network


class Residual(nn.Module):
    """A linear layer and two residual blocks of two."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.first(x.flatten(1)))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(F.relu(inner(x)))
        return self.head(x)


class Quickstart(nn.Module):
    """The network of Flower's PyTorch quickstart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class ConvHead(nn.Module):
    """Three convolutions and a linear layer: 2,048 features, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, 2, 1)
        self.third = nn.Conv2d(32, 32, 3, 2, 1)
        self.head = nn.Linear(2048, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.third(F.relu(self.second(F.relu(self.first(x))))))
        return self.head(x.flatten(1))


def residual(spec: InputSpec) -> nn.Module:
    """See :class:`Residual`."""
    return Residual(torch.Size(spec.shape).numel(), 300, spec.num_classes)


def quickstart(spec: InputSpec) -> nn.Module:
    """See :class:`Quickstart`."""
    return Quickstart()


def conv_head(spec: InputSpec) -> nn.Module:
    """See :class:`ConvHead`."""
    return ConvHead()


TEN = (0, 0, 1, 1, 2, 2, 3, 4, 5, 5)
CASES = (
    Case("MLP 3×1000", mlp(1000, 1000, 1000), "cifar10", 64),
    Case("MLP 6×200", mlp(*[200] * 6), "cifar10", 24),
    Case("MLP 3×1000", mlp(1000, 1000, 1000), "mnist", 32),
    Case("MLP 3×1000", mlp(1000, 1000, 1000), "mnist", 64),
    Case("MLP 3×1000, 2 epochs", mlp(1000, 1000, 1000), "cifar10", 64, (2,) * 3),
    Case("MLP 3×1000, wire", mlp(1000, 1000, 1000), "cifar10", 64, (0,) * 3, 0.1),
    Case("MLP 3×1000, wire", mlp(1000, 1000, 1000), "cifar10", 64, (0,) * 3, 0.01),
    Case("MLP 6×200, wire", mlp(*[200] * 6), "cifar10", 24, (0,) * 5, 0.1),
    Case("MLP 6×200, wire", mlp(*[200] * 6), "cifar10", 24, (0,) * 5, 0.01),
    Case("MLP 3×1000, 5 steps", mlp(1000, 1000, 1000), "cifar10", 16, (0,) * 5, 0.1, 5),
    Case("MLP 3×1000, 5 steps", mlp(1000, 1000, 1000), "cifar10", 16, (0,) * 5, 0.01, 5),
    Case("2 layers, Cascading", cascading, "cifar10", 128, double=True, pixels=True),
    Case("2 layers, Cascading", cascading, "fashion_mnist", 128, double=True, pixels=True),
    Case("2 layers, Cascading", cascading, "mnist", 64, double=True, pixels=True),
    Case("2 layers, PyTorch", mlp(1000), "cifar10", 16),
    Case("2 layers, PyTorch", mlp(1000), "cifar10", 32),
    Case("2 layers, PyTorch", mlp(1000), "cifar10", 64),
    Case("2 layers, PyTorch", mlp(1000), "cifar10", 128),
    Case("2 layers, PyTorch, 2 epochs", mlp(1000), "cifar10", 64, (2,) * 3),
    Case("2 layers, PyTorch, wire", mlp(1000), "cifar10", 32, (0,) * 5, 0.01),
    Case("2 layers, PyTorch, wire", mlp(1000), "cifar10", 64, (0,) * 5, 0.01),
    Case("residual MLP", residual, "cifar10", 32, (0, 0, 0, 2, 2)),
    Case("quickstart, features", quickstart, "cifar10", 32, TEN),
    Case("ConvNet head, features", conv_head, "cifar10", 2, (0, 0, 3, 3)),
    Case("ConvNet head, features", conv_head, "cifar10", 4, (0, 0, 3, 3)),
    Case("ConvNet head, features", conv_head, "cifar10", 8, (*(0,) * 10, *(3,) * 6, *(6,) * 4)),
)


def load(root: Path, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Pixels (N, C, H, W) in [0, 1] and labels."""
    with np.load(root / f"{name}_{split}.npz", allow_pickle=False) as file:
        images, labels = torch.tensor(file["images"]), torch.tensor(file["labels"])
    images = images.permute(0, 3, 1, 2).contiguous() if images.ndim == 4 else images[:, None]
    return images.float() / 255, labels


def train(network: nn.Module, images: Batch, epochs: int) -> None:
    """SGD on batches of 32, learning rate 0.02, momentum 0.9."""
    optimizer = torch.optim.SGD(network.parameters(), 0.02, momentum=0.9)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(network(images.inputs[chosen]), images.targets[chosen]).backward()
            optimizer.step()


def observe(gradient_map: GradientMap, batch: Batch, case: Case) -> Observation:
    """What a server sees of the batch."""
    params = gradient_map.params
    schedule = LocalSchedule(case.learning_rate or 1.0, case.steps, len(batch))
    if case.learning_rate:
        change = local_update(gradient_map, params, batch, schedule, gradient_map.buffers)
        delta = {k: ((params[k] + v) - params[k]).detach() for k, v in change.items()}
    else:
        delta = {k: -v.detach() for k, v in gradient_map(params, batch).items()}
    update = Update(delta, gradient_map.buffers, schedule, len(batch))
    return Observation(1, 0, params, gradient_map.buffers, update)


def score(
    found: Reconstruction,
    truth: Batch,
    gradient_map: GradientMap,
    spec: InputSpec,
    told: InputSpec | None = None,
) -> tuple[int, int, int]:
    """Samples that are exact, proven, and proven but not exact.

    Args:
        found: an attack's answer.
        truth: the private batch.
        gradient_map: of the network.
        spec: how the client normalised.
        told: what the attacker was told of it, if that is something else.
    """
    features = found.stats.get("features")
    if features is not None:
        posed = pose(gradient_map, spec, observe(gradient_map, truth, CASES[0]), ThreatModel())
        uses = traced(posed, truth.inputs).linear
        known = next(u.inputs for u in uses if u.name == features.layer).double()
        guesses, labels, verdicts = features.inputs, features.labels, features.verdicts
    elif found.batch is not None:
        known = spec.denormalize(truth.inputs).flatten(1).double()
        guesses = (told or spec).denormalize(found.batch.inputs).flatten(1).double()
        labels = found.batch.targets
        verdicts = found.stats.get("verdicts", ("not",) * len(labels))
    else:
        return 0, 0, 0
    distances = torch.cdist(guesses, known)
    nearest = distances.argmin(1)
    errors = distances.amin(1)
    if features is not None:
        close = errors <= EXACT_FEATURES * known[nearest].norm(dim=1)
    else:
        close = errors <= 10 ** (-EXACT_DB / 20) * known.shape[1] ** 0.5
    right = close & (labels == truth.targets[nearest])
    proven = torch.tensor([verdict == "proven" for verdict in verdicts])
    return len(set(nearest[right].tolist())), int(proven.sum()), int((proven & ~right).sum())


@dataclass(frozen=True)
class Drawn:
    """The result of the attack on the update of one batch.

    Attributes:
        exact: samples found exactly.
        proven: samples called proven.
        wrong: samples called proven that are not exact.
        seconds: of the CPU.
        said: the attack's reason where it has no answer.
    """

    exact: int
    proven: int
    wrong: int
    seconds: float
    said: str | None


def draw(case: Case, epochs: int, root: Path, seed: int) -> tuple[nn.Module, InputSpec, Batch]:
    """Draw a network's weights and a batch by a seed; the network is trained for some epochs."""
    shape = SHAPES[case.dataset]
    half = (0.0, 1.0) if case.pixels else (0.5, 0.5)
    spec = InputSpec(shape, case.classes, (half[0],) * shape[0], (half[1],) * shape[0])
    pixels, labels = load(root, case.dataset, "test")
    test = Batch(spec.normalize(pixels), labels)[UNSEEN:]
    torch.manual_seed(seed)
    network = case.network(spec)
    if epochs:
        pixels, labels = load(root, case.dataset, "train")
        train(network, Batch(spec.normalize(pixels), labels)[:TRAINING], epochs)
    stream = torch.Generator().manual_seed(seed)
    batch = test[torch.randperm(len(test), generator=stream)[: case.batch_size]]
    if case.classes != 10:
        drawn = torch.randint(case.classes, (len(batch),), generator=stream)
        batch = Batch(batch.inputs, drawn)
    if case.double:
        network, batch = network.double(), Batch(batch.inputs.double(), batch.targets)
    return network.eval(), spec, batch


def attack(
    seen: Observation,
    truth: Batch,
    gradient_map: GradientMap,
    spec: InputSpec,
    max_seconds: float | None = None,
) -> Drawn:
    """Attack an update within some CPU seconds, and compare the answer with its batch."""
    job = AttackJob(gradient_map, spec, [seen], ThreatModel(), max_seconds=max_seconds)
    began = time.process_time()
    (found,) = ExactBatch()(job)
    seconds = time.process_time() - began
    return Drawn(*score(found, truth, gradient_map, spec), seconds, found.error)


def attack_draw(case: Case, epochs: int, root: Path, seed: int) -> Drawn:
    """Draw weights and a batch by a seed, and attack its update."""
    network, spec, batch = draw(case, epochs, root, seed)
    gradient_map = GradientMap(network)
    return attack(observe(gradient_map, batch, case), batch, gradient_map, spec)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--draws", type=int, default=20, help="the most draws of a row")
    parser.add_argument("--cases", default="", help="rows whose name or data set holds this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| network | data | B | lr of the wire | draws | exact | proven | wrongly proven | "
        "CPU s, mean | max |\n|---|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for case in CASES:
        if given.cases not in f"{case.name} {case.dataset} {case.batch_size}":
            continue
        drawn = []
        for number, epochs in enumerate(case.epochs[-given.draws :]):
            seed = given.first_seed + number
            drawn.append(attack_draw(case, epochs, given.root, seed))
            print(case.name, seed, drawn[-1], file=sys.stderr)
        exact = [each.exact for each in drawn]
        seconds = [each.seconds for each in drawn]
        cells = (
            case.name,
            case.dataset,
            case.batch_size,
            f"{case.learning_rate:g}" if case.learning_rate else "–",
            len(exact),
            f"{sum(exact)} of {case.batch_size * len(exact)} ({', '.join(map(str, exact))})",
            sum(each.proven for each in drawn),
            sum(each.wrong for each in drawn),
            f"{statistics.fmean(seconds):.1f}",
            f"{max(seconds):.1f}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
