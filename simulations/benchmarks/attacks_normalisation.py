"""Is a proof stated over wrong pixels where the attacker is told a wrong normalisation?

    python -m simulations.benchmarks.attacks_normalisation --root FOLDER

attacks batches of 1, 4 and 8 samples by ``exact_batch``, and those of 1 by ``analytic`` too, and
prints a Markdown table. FOLDER holds ``NAME_train.npz`` and ``NAME_test.npz`` of ``cifar10`` and
``fashion_mnist``. The attacker knows the network, and the clients' normalisation or another one.
Tables are the 8 by 8 digits of scikit-learn as rows of 64 numbers, standardised by column.

An answer is right if its pixels are within 60 dB of a private image, with that one's label, and for
a table if its numbers are within 1e-3 of a private row's. *Wrongly proven* is proven and not right.
*Read off* counts proven answers under a normalisation that the attacker was not told, and *inputs*
those of which the network's inputs alone are proven.

Networks and batches have seeds from ``--first-seed`` on; batches are of test images from number 100
on. Labels are inferred. One thread.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import Analytic, AttackJob, ExactBatch
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.attacks.one_by_one import PROVEN_INPUTS
from flwr_leakage.conventions import normalizations_agree
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Reconstruction, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import SHAPES, Case, load, mlp, observe, score, train


class Split(nn.Module):
    """A first linear layer whose features two branches take: one linear, one of two layers."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 200)
        self.short = nn.Linear(200, classes)
        self.long = nn.Sequential(nn.Linear(200, 60), nn.ReLU(), nn.Linear(60, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.first(x.flatten(1)))
        return self.short(x) + self.long(x)


def split(spec: InputSpec) -> nn.Module:
    """See :class:`Split`."""
    return Split(torch.Size(spec.shape).numel(), spec.num_classes)


def bottleneck(spec: InputSpec) -> nn.Module:
    """A wide layer, a narrow one, and GELU behind it."""
    inputs = torch.Size(spec.shape).numel()
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(inputs, 300), nn.ReLU(), nn.Linear(300, 24), nn.GELU()),
        nn.Linear(24, spec.num_classes),
    )


NETWORKS: dict[str, tuple[Callable[[InputSpec], nn.Module], int]] = {
    "MLP 256": (mlp(256), 0),
    "MLP 160-96": (mlp(160, 96), 0),
    "MLP 4×96": (mlp(96, 96, 96, 96), 0),
    "MLP 160-96, trained": (mlp(160, 96), 3),
    "branches": (split, 0),
    "bottleneck": (bottleneck, 0),
}
"""What makes each network, and the epochs of its training."""

DATASETS = ("cifar10", "fashion_mnist")
SIZES = (1, 4, 8)
TRAINING = 2000
TABLE = "digits as a table"
TABLE_SHAPE = (1, 1, 64)

STATISTICS = {
    "cifar10": (lab.CIFAR10_MEAN, lab.CIFAR10_STD),
    "fashion_mnist": ((0.2860,), (0.3530,)),
}
NORMALISATIONS = {
    "none": lambda name: ((0.0,), (1.0,)),
    "0.5, 0.5": lambda name: ((0.5,), (0.5,)),
    "statistics": lambda name: STATISTICS.get(name, ((0.1307,), (0.3081,))),
    "0.4, 0.3": lambda name: ((0.4,), (0.3,)),
}
"""Mean and standard deviation for a data set, by name."""

ROWS = (
    ("0.5, 0.5", "0.5, 0.5"),
    ("statistics", "statistics"),
    ("none", "none"),
    ("0.5, 0.5", "none"),
    ("statistics", "none"),
    ("statistics", "0.5, 0.5"),
    ("0.5, 0.5", "statistics"),
    ("none", "0.5, 0.5"),
    ("0.4, 0.3", "statistics"),
    ("0.4, 0.3", "0.5, 0.5"),
)
"""How clients normalise, and what the attacker is told."""

TABLE_ROWS = ("no box", "none", "0.5, 0.5", "statistics")
"""What the attacker is told of a standardised table."""


def table() -> Batch:
    """The digits of scikit-learn as rows (N, 1, 1, 64), standardised; a constant column is 0."""
    from sklearn.datasets import load_digits

    rows, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(rows), generator=lab.generator(0))
    rows = (rows - rows.mean(0)) / rows.std(0).clamp_min(1e-3)
    return Batch(rows.float().reshape(-1, *TABLE_SHAPE)[order], labels[order])


def specs_of(name: str, own: str, told: str) -> tuple[InputSpec, InputSpec]:
    """The clients' spec and the one that the attacker is told."""
    if name == TABLE:
        right = InputSpec.table(TABLE_SHAPE[2], lab.CLASSES)
        wrong = InputSpec(TABLE_SHAPE, lab.CLASSES, *NORMALISATIONS.get(told, lambda _: ())(name))
        return right, right if told == "no box" else wrong
    spec, guess = (
        InputSpec(SHAPES[name], lab.CLASSES, *NORMALISATIONS[each](name)) for each in (own, told)
    )
    return spec, guess


def judged(
    found: Reconstruction, truth: Batch, gradient_map: GradientMap, spec: InputSpec, told: InputSpec
) -> list[int]:
    """Samples right, proven, wrongly proven, proven under a spec read off, inputs proven alone."""
    used = found.spec or told
    right, proven, wrong = score(found, truth, gradient_map, spec, used)
    read = proven if found.spec is not None and normalizations_agree(found.spec, spec) else 0
    inputs = int(found.stats.get(PROVEN_INPUTS, 0)) - proven if used.box else 0
    return [right, proven, wrong, read, inputs]


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--first-seed", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--draws", type=int, default=5, help="of each network, data set and size")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a search, at most")
    given = lab.start(parser)
    exact = ExactBatch(SearchSettings(max_seconds=given.seconds))
    samples = {
        name: Batch(*load(given.root, name, "test"))[lab.REPORTED_FROM :] for name in DATASETS
    }
    training = {name: Batch(*load(given.root, name, "train"))[:TRAINING] for name in DATASETS}
    rows = table()
    samples[TABLE], training[TABLE] = rows[: -TRAINING // 2], rows[-TRAINING // 2 :]
    lab.print_header(
        "data", "clients' normalisation", "the attacker's", "batches", "answers", "right", "proven",
        "wrongly proven", "read off", "inputs", "CPU s",
    )  # fmt: skip
    cases = [("images", DATASETS, *row) for row in ROWS]
    cases += [("table", (TABLE,), "standardised", told) for told in TABLE_ROWS]
    for kind, names, own, told in cases:
        counts, batches = torch.zeros(6, dtype=torch.int64), 0
        with lab.Stopwatch() as watch:
            for name in names:
                spec, guess = specs_of(name, own, told)
                for make, epochs in NETWORKS.values():
                    for draw in range(given.draws):
                        seed = given.first_seed + draw
                        torch.manual_seed(seed)
                        network = make(spec)
                        known = name == TABLE
                        shown = training[name] if known else lab.normalize(training[name], spec)
                        train(network, shown, epochs)
                        gradient_map = GradientMap(network.eval())
                        order = torch.randperm(len(samples[name]), generator=lab.generator(seed))
                        for size in SIZES:
                            truth = samples[name][order[:size]]
                            truth = truth if known else lab.normalize(truth, spec)
                            seen = observe(gradient_map, truth, Case("", make, name, size))
                            job = AttackJob(gradient_map, guess, [seen], ThreatModel())
                            batches += 1
                            for attack in (exact, Analytic())[: 2 if size == 1 else 1]:
                                (found,) = attack(job)
                                counts += torch.tensor(
                                    [size, *judged(found, truth, gradient_map, spec, guess)]
                                )
        lab.print_row(kind, own, told, batches, *counts.tolist(), f"{watch.seconds:.0f}")


if __name__ == "__main__":
    main()
