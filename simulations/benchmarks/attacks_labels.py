"""Share of a batch's labels that the update's last layer gives away, by method.

    python -m simulations.benchmarks.attacks_labels --root FOLDER

prints a Markdown row a network, its training epochs and a batch size: the share of labels found,
repetitions counted, and in brackets the share of batches without a mistake, for

``default``    this project's counts: of the classes that signs in the span of the last layer's
               errors allow, with the softmax of the gradient's mean feature vector
``features``   the same without these signs
``dummies``    the same, with the mean softmax of 64 random images
``public``     the same, with that of 64 public images (training images that the network never saw)
``LLG``        iDLG carried over to repeated classes (Wainakh et al. 2022)
``Yin``        the smallest entries of the last gradient (Yin et al. 2021): every class once at most

Batches are drawn from test images at random, so that classes repeat. BatchNorm is in train mode.

    python -m simulations.benchmarks.attacks_labels clients --root FOLDER --seeds 100,101

infers the class counts of whole clients from the update of an epoch or five, of SGD or Adam, by
``rehearse``. Three clients with class frequencies of a Dirichlet distribution (0.5) train on
CIFAR-10 and on Fashion-MNIST. A row has a size n, optimizer, epochs, and whether the network was
trained on other images before: the share of labels that are right for each of three networks, what
the rehearsals expected, what equal counts and the mean of the three clients' inferred counts have
right, the share of clients above both, and CPU seconds for a client.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.labels.rehearsed import rehearse, share_right
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.models import MLP, ConvNet, LeNet, ResNet18, initialize
from flwr_leakage.params import subtract
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batch_norm import PUBLIC, train_in_train_mode

Method = Callable[[Problem], Tensor]


def networks(width: int, stream: torch.Generator) -> dict[str, nn.Module]:
    """The networks, untrained."""
    shape, classes = lab.SHAPE, lab.CLASSES
    lenet = LeNet(shape, classes, num_convolutions=3)
    tanh = LeNet(shape, classes, num_convolutions=3, activation="tanh")
    return {
        "LeNet, U(±0.5)": initialize(lenet, "uniform", stream),
        "LeNet, tanh": initialize(tanh, "default", stream),
        "ConvNet": initialize(ConvNet(shape, classes, width), "default", stream),
        "ResNet-18": initialize(ResNet18(shape, classes, width), "default", stream),
    }


def methods(public: Tensor) -> dict[str, Method]:
    """Labels of a problem, by name."""
    return {
        "default": lambda problem: ClassCounts()(problem, lab.generator()),
        "features": lambda problem: ClassCounts(signs=False)(problem, lab.generator()),
        "dummies": lambda problem: ClassCounts("dummies", signs=False)(problem, lab.generator()),
        "public": lambda problem: ClassCounts("dummies", public=public, signs=False)(
            problem, lab.generator()
        ),
        "LLG": lambda problem: labels_from_impact(_last_weight(problem), problem.num_samples),
        "Yin": lambda problem: smallest_columns(_last_weight(problem), problem.num_samples),
    }


def _last_weight(problem: Problem) -> Tensor:
    return problem.gradient[list(problem.gradient)[-2]]


def labels_from_impact(weight_gradient: Tensor, num_samples: int) -> Tensor:
    """Return the labels (B,) of LLG (Wainakh et al. 2022, algorithm 1) in ascending order.

    Row sums ``g_i`` of ``∂L/∂W`` are negative for classes that occur. The estimate of one sample's
    impact is ``m = (1 + 1/K) / B · Σ_{g_i < 0} g_i``. The algorithm takes every class with g_i < 0
    once. Then it takes the class with the smallest g_i until there are B labels. After each label
    it subtracts m from the class's g_i.
    """
    sums = weight_gradient.sum(dim=1).double()
    impact = sums.clamp_max(0).sum() * (1 + 1 / len(sums)) / num_samples
    labels = (sums < 0).nonzero().flatten().tolist()
    labels = sorted(labels, key=lambda label: float(sums[label]))[:num_samples]
    for label in labels:
        sums[label] -= impact
    while len(labels) < num_samples:
        label = int(sums.argmin())
        labels.append(label)
        sums[label] -= impact
    return torch.tensor(sorted(labels), device=weight_gradient.device)


def smallest_columns(weight_gradient: Tensor, num_samples: int) -> Tensor:
    """Return the B classes whose rows of ``∂L/∂W`` have the least minima (Yin et al. 2021, eq. 8).

    With non-negative features only a class that occurs has clearly negative entries. A class
    that occurs twice is found once.
    """
    return weight_gradient.amin(dim=1).argsort()[:num_samples].sort().values


def share(found: Tensor, truth: Tensor) -> float:
    """Labels in common, repetitions counted, over the batch size."""
    left, right = (torch.bincount(labels, minlength=lab.CLASSES) for labels in (found, truth))
    return float(torch.minimum(left, right).sum()) / len(truth)


CLIENTS, BATCH = 3, 32
FASHION = InputSpec((1, 28, 28), 10, (0.2860,), (0.3530,))
SGD_RATES = {"CNN": 0.1, "LeNet": 0.05, "MLP": 0.05}
"""Learning rates of SGD by network; Adam has its default of 1e-3."""


class QuickstartCNN(nn.Module):
    """The network of ``simulations/examples/quickstart``, for images of any size."""

    def __init__(self, shape: lab.Shape) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 8, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(8, 16, 5, stride=2, padding=2)
        self.fc1 = nn.Linear(16 * -(-height // 4) * -(-width // 4), 32)
        self.fc2 = nn.Linear(32, lab.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 10)."""
        hidden = torch.sigmoid(self.conv2(torch.sigmoid(self.conv1(images))))
        return self.fc2(torch.sigmoid(self.fc1(hidden.flatten(1))))


def client_networks(shape: lab.Shape, seed: int) -> dict[str, nn.Module]:
    """Return the three networks, untrained."""
    torch.manual_seed(seed)
    lenet = LeNet(shape, lab.CLASSES, num_convolutions=3, activation="relu")
    mlp = MLP(shape, lab.CLASSES, (256, 256))
    return {"CNN": QuickstartCNN(shape), "LeNet": lenet, "MLP": mlp}


def read_both(root: Path, name: str, spec: InputSpec) -> tuple[Batch, Batch]:
    """Return the images that a network is trained on before, and those that clients draw from."""
    parts = [lab.read_images(root / f"{name}_{part}.npz", 0, 10_000) for part in ("train", "test")]
    images = lab.normalize(Batch.concatenate(parts), spec)
    first = 2500 if name == "cifar10" else 4000
    return images[:first], images[first:]


def draw_client(pool: Batch, count: int, stream: torch.Generator) -> Batch:
    """Return samples by Dirichlet class frequencies; a class that is too small gives some twice."""
    concentration = torch.full((lab.CLASSES,), 0.5)
    frequencies = torch._standard_gamma(concentration, generator=stream).clamp_min(1e-6)
    labels = torch.multinomial(frequencies, count, replacement=True, generator=stream)
    chosen = []
    for label, wanted in enumerate(torch.bincount(labels, minlength=lab.CLASSES).tolist()):
        own = (pool.targets == label).nonzero().flatten()
        order = torch.randperm(len(own), generator=stream)
        chosen.append(own[order[torch.arange(wanted) % len(own)]])
    return pool[torch.cat(chosen)]


def trained_client(
    network: nn.Module, samples: Batch, optimizer: str, rate: float, epochs: int, seed: int
) -> Update:
    """Return the update of a client that trains a copy of the network, shuffled in each epoch."""
    before = {name: value.clone() for name, value in network.state_dict().items()}
    steps = getattr(torch.optim, optimizer)(network.parameters(), rate)
    order = lab.generator(seed)
    for _ in range(epochs):
        lab.train(network, steps, lab.shuffled(samples, BATCH, order))
    after = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(before)
    schedule = LocalSchedule(rate, epochs * -(-len(samples) // BATCH), BATCH)
    return Update(subtract(after, before), {}, schedule, len(samples))


def clients(root: Path, seeds: list[int], sizes: list[int]) -> None:
    """Print the table of whole clients."""
    starts = []
    sets = ("cifar10", lab.CIFAR10), ("fashion_mnist", FASHION)
    for seed, (name, spec) in product(seeds, sets):
        public, pool = read_both(root, name, spec)
        for label, network in client_networks(spec.shape, seed).items():
            starts.append((False, seed, label, spec, pool, network))
        for label, network in client_networks(spec.shape, seed).items():
            steps = torch.optim.Adam(network.parameters(), 3e-3 if label == "CNN" else 1e-3)
            for _ in range(8):
                lab.train(network, steps, lab.shuffled(public, BATCH, lab.generator(seed)))
            starts.append((True, seed, label, spec, pool, network))
    lab.print_header(
        "n", "network", "optimizer", "epochs", "CNN", "LeNet", "MLP", "expected", "equal counts",
        "mean of clients", "above both", "CPU s",
    )  # fmt: skip
    for size, trained, optimizer, epochs in product(sizes, (False, True), ("SGD", "Adam"), (1, 5)):
        right: dict[str, list[float]] = {"CNN": [], "LeNet": [], "MLP": []}
        expected, equal, mean, above, seconds = [], [], [], [], []
        for is_trained, seed, label, spec, pool, network in starts:
            if is_trained is not trained:
                continue
            rate = SGD_RATES[label] if optimizer == "SGD" else 1e-3
            gradient_map, stream = GradientMap(network), lab.generator(1000 * seed + size)
            problems, truths = [], []
            for index in range(CLIENTS):
                samples = draw_client(pool, size, stream)
                update = trained_client(network, samples, optimizer, rate, epochs, seed + index)
                seen = Observation(1, index, gradient_map.params, {}, update)
                problems.append(pose(gradient_map, spec, seen, ThreatModel()))
                truths.append(torch.bincount(samples.targets, minlength=lab.CLASSES))
            with lab.Stopwatch() as watch:
                rehearsals = rehearse(problems[0], optimizer, seed=seed)
                found = [rehearsals.estimate(problem) for problem in problems]
            middle = torch.stack([each.counts for each in found]).double().mean(0)
            flat = torch.full_like(middle, size / lab.CLASSES)
            for estimate, truth in zip(found, truths, strict=True):
                shares = [share_right(each, truth) for each in (estimate.counts, flat, middle)]
                right[label].append(shares[0])
                expected.append(estimate.expected_right)
                equal.append(shares[1])
                mean.append(shares[2])
                above.append(float(shares[0] > max(shares[1:])))
            seconds.append(watch.seconds)
        columns = (*right.values(), expected, equal, mean, above)
        cells = [f"{100 * sum(column) / len(column):.0f}" for column in columns]
        spent = f"{sum(seconds) / len(seconds):.1f}"
        kind = "trained" if trained else "untrained"
        lab.print_row(f"{size:,}", kind, optimizer, epochs, *cells, spent)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("what", nargs="?", choices=["batches", "clients"], default="batches")
    parser.add_argument("--seeds", default="100", help="of the networks and clients")
    parser.add_argument("--sizes", default="64,500,5000", help="of the clients")
    lab.add_data(parser)
    parser.add_argument("--width", type=int, default=8, help="of ConvNet and ResNet-18")
    parser.add_argument("--batches", default="2,4,6,8,16", help="sizes of a batch")
    parser.add_argument("--epochs", default="0,1,4")
    parser.add_argument("--trials", type=int, default=20, help="batches a row")
    given = lab.start(parser)
    if given.what == "clients":
        seeds, sizes = (list(map(int, each.split(","))) for each in (given.seeds, given.sizes))
        clients(given.root, seeds, sizes)
    else:
        batches(given)


def batches(given: argparse.Namespace) -> None:
    """Print the table of single batches."""
    torch.manual_seed(given.seed)
    spec = lab.CIFAR10
    images = lab.normalize(lab.load(given.root, "train", 0, 5000), spec)
    public, training = images.inputs[-PUBLIC:], images[:-PUBLIC]
    private = lab.normalize(lab.load(given.root, given.split, 0, 600), spec)
    columns = methods(public)
    lab.print_header("network", "epochs", "accuracy", "B", *columns)
    stream = lab.generator(given.seed)
    for name, network in networks(given.width, stream).items():
        trained = 0
        for epochs in map(int, given.epochs.split(",")):
            train_in_train_mode(network, training, epochs - trained)
            trained = epochs
            reached = classifier_utility(network, [private]).accuracy
            gradient_map = GradientMap(network, batch_norm="batch")
            for size in map(int, given.batches.split(",")):
                shares: dict[str, list[float]] = {column: [] for column in columns}
                for index in range(given.trials):
                    batch = private[torch.randperm(len(private), generator=stream)[:size]]
                    seen = lab.observe(gradient_map, batch, client_id=index)
                    problem = pose(gradient_map, spec, seen, ThreatModel())
                    for column, method in columns.items():
                        shares[column].append(share(method(problem), batch.targets))
                cells = [
                    f"{100 * sum(v) / len(v):.0f} % ({100 * sum(s == 1 for s in v) / len(v):.0f} %)"
                    for v in shares.values()
                ]
                lab.print_row(name, epochs, f"{100 * reached:.0f} %", size, *cells)


if __name__ == "__main__":
    main()
