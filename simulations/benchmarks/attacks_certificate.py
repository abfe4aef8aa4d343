"""Is a sample that ``exact_batch`` calls proven ever wrong?

    python -m simulations.benchmarks.attacks_certificate --root FOLDER

attacks batches of small networks under many settings, those included in which the attacker was told
wrongly how the update came about, and prints a Markdown table. A sample is right if it is within
60 dB of a private image (features: within a relative error of 1e-3) and has that one's label.
*Wrongly proven* is proven and not right. The last line gives the largest rate of wrong proofs that
such a count leaves possible (Clopper and Pearson 1934, one-sided, 95 %); samples of a batch are not
independent, so it is a rough one.

Networks and batches have seeds from ``--first-seed`` on. Images are CIFAR-10 test images from
number 100 on, averaged to 8 × 8 pixels; trained networks saw training images. Labels are inferred
unless the row says otherwise. One thread.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import beta
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, ExactBatch
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.defenses.noise import GaussianNoise
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import Residual, score
from simulations.benchmarks.portfolio_cases import load

SIZE = 8
SPEC = InputSpec((3, SIZE, SIZE), lab.CLASSES, (0.5,) * 3, (0.5,) * 3)


@dataclass(frozen=True)
class Setting:
    """How an update came about, and what the attacker is told of it.

    Attributes:
        name: of the row.
        rate: learning rate; 0 for the gradient itself, else parameters are rounded on the wire.
        steps: local steps on the whole batch.
        told_steps: how many the attacker is told.
        told_more: how many samples more than there are it is told.
        weight_decay: which it is not told of.
        smoothing: of labels, which it is not told of.
        noise: Gaussian noise on the update, relative to its norm.
        pruned: share of entries that are set to zero.
        stale: the parameters that the attacker knows are off by this share of each one's size.
        double: the batch holds every sample twice.
        labels: granted to the attacker: ``right``, ``wrong``, or inferred.
    """

    name: str
    rate: float = 0.0
    steps: int = 1
    told_steps: int = 1
    told_more: int = 0
    weight_decay: float = 0.0
    smoothing: float = 0.0
    noise: float = 0.0
    pruned: float = 0.0
    stale: float = 0.0
    double: bool = False
    labels: str = "inferred"


SETTINGS = (
    Setting("exact"),
    Setting("wire, rate 0.1", rate=0.1),
    Setting("wire, rate 0.01", rate=0.01),
    Setting("wire, rate 0.001", rate=0.001),
    Setting("noise 1e-4", noise=1e-4),
    Setting("noise 1e-3", noise=1e-3),
    Setting("noise 1e-2", noise=1e-2),
    Setting("pruned 0.1", pruned=0.1),
    Setting("pruned 0.5", pruned=0.5),
    Setting("five steps, told", rate=0.1, steps=5, told_steps=5),
    Setting("two steps of 0.1, told one", rate=0.1, steps=2),
    Setting("two steps of 0.01, told one", rate=0.01, steps=2),
    Setting("three steps, told two", rate=0.1, steps=3, told_steps=2),
    Setting("one sample more told", told_more=1),
    Setting("weight decay 1e-5, not told", rate=0.1, weight_decay=1e-5),
    Setting("label smoothing 1e-3, not told", smoothing=1e-3),
    Setting("parameters off by 1e-5", stale=1e-5),
    Setting("parameters off by 1e-3", stale=1e-3),
    Setting("every sample twice", double=True),
    Setting("labels granted, wrong", labels="wrong"),
)


def mlp(*widths: int) -> Callable[[], nn.Module]:
    """Linear layers with ReLU on the flattened image."""

    def make() -> nn.Module:
        sizes = (3 * SIZE * SIZE, *widths)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], lab.CLASSES))

    return make


def convnet() -> nn.Module:
    """Convolutions with ReLU and pooling before two linear layers: features, no images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, lab.CLASSES),
    )  # fmt: skip


def head() -> nn.Module:
    """Convolutions before one linear layer: eight samples' errors of ten classes nearly depend."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, lab.CLASSES),
    )  # fmt: skip


def residual() -> nn.Module:
    """Paths lead around the second layer."""
    return Residual(3 * SIZE * SIZE, 160, lab.CLASSES)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "MLP 256": (mlp(256), 0, 6),
    "MLP 160-96": (mlp(160, 96), 0, 6),
    "MLP 4×96": (mlp(96, 96, 96, 96), 0, 6),
    "MLP 160-96, 3 epochs": (mlp(160, 96), 3, 6),
    "ConvNet": (convnet, 0, 6),
    "ConvNet, 3 epochs": (convnet, 3, 6),
    "head": (head, 0, 8),
    "head, 3 epochs": (head, 3, 8),
    "residual MLP": (residual, 0, 6),
    "residual MLP, 3 epochs": (residual, 3, 6),
}
"""What makes each network, the epochs of its training, and the samples of a batch."""


def make_network(name: str, training: Batch, seed: int) -> GradientMap:
    """A network, trained if its row says so."""
    make, epochs, _ = NETWORKS[name]
    torch.manual_seed(seed)  # layers draw their weights from the global stream
    network = make()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for _ in range(epochs):
        lab.train(network, optimizer, lab.shuffled(training, 32))
    return GradientMap(network.eval())


def observe(
    gradient_map: GradientMap, batch: Batch, setting: Setting, seed: int
) -> tuple[Observation, ThreatModel]:
    """What the attacker sees, and what it is granted."""
    params, count = gradient_map.params, len(batch)
    honest = gradient_map
    if setting.smoothing:
        smoothing = setting.smoothing
        honest = gradient_map.with_loss(
            lambda logits, y: F.cross_entropy(logits, y, label_smoothing=smoothing)
        )
    rate = setting.rate or 1.0
    schedule = LocalSchedule(rate, setting.steps, count, weight_decay=setting.weight_decay)
    change = local_update(honest, params, batch, schedule)
    delta = {name: value.detach() for name, value in change.items()}
    if setting.rate:
        delta = {name: (params[name] + value) - params[name] for name, value in delta.items()}
    told = count + setting.told_more
    update = Update(delta, {}, LocalSchedule(rate, setting.told_steps, told), told)
    draws = Reproducible.from_seed(seed)
    if setting.noise:
        update = GaussianNoise(setting.noise, relative_to="norm").on_update(update, draws)
    if setting.pruned:
        update = GradientPruning(setting.pruned).on_update(update, draws)
    if setting.stale:
        stream = lab.generator(seed)
        params = {
            name: value * (1 + setting.stale * torch.randn(value.shape, generator=stream))
            for name, value in params.items()
        }
    granted, disclosed = ThreatModel(), Disclosure()
    if setting.labels == "wrong":
        granted = ThreatModel(labels="known")
        disclosed = Disclosure(targets=(batch.targets + 1) % lab.CLASSES)
    return Observation(1, seed, params, {}, update, disclosed), granted


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--first-seed", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--draws", type=int, default=3, help="of each network and setting")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the search, at most")
    given = lab.start(parser)
    test = lab.normalize(load(given.root, "test", lab.REPORTED_FROM, 9000, 32 // SIZE), SPEC)
    training = lab.normalize(load(given.root, "train", 0, 2000, 32 // SIZE), SPEC)
    attack = ExactBatch(SearchSettings(max_seconds=given.seconds))
    networks = {
        given.first_seed + 10 * number + draw: (
            make_network(name, training, draw + given.first_seed),
            NETWORKS[name][2],
        )
        for number, name in enumerate(NETWORKS)
        for draw in range(given.draws)
    }
    lab.print_header("setting", "samples", "right", "proven", "wrongly proven", "refused", "CPU s")
    totals = torch.zeros(4, dtype=torch.int64)
    for setting in SETTINGS:
        counts, refused = torch.zeros(4, dtype=torch.int64), 0
        with lab.Stopwatch() as watch:
            for seed, (gradient_map, samples) in networks.items():
                chosen = torch.randperm(len(test), generator=lab.generator(seed))
                if setting.double:
                    chosen = chosen.repeat_interleave(2)
                truth = test[chosen[:samples]]
                seen, granted = observe(gradient_map, truth, setting, seed)
                (found,) = attack(AttackJob(gradient_map, SPEC, [seen], granted))
                refused += found.batch is None and "features" not in found.stats
                right, proven, wrong = score(found, truth, gradient_map, SPEC)
                counts += torch.tensor([samples, right, proven, wrong])
        totals += counts
        lab.print_row(setting.name, *counts.tolist(), refused, f"{watch.seconds:.0f}")
    lab.print_row("all", *totals.tolist(), "", "")
    proven, wrong = int(totals[2]), int(totals[3])
    limit = float(beta.ppf(0.95, wrong + 1, proven - wrong)) if proven > wrong else 1.0
    print(f"\n{wrong} of {proven} proofs wrong: a rate of at most {limit:.2%} (95 %, one-sided).")


if __name__ == "__main__":
    main()
