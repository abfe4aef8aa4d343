"""Is a proof stated over wrong pixels where the attacker is told a wrong normalisation?

    python -m simulations.benchmarks.attacks_normalisation --root FOLDER

attacks batches of 1, 4 and 8 images by ``exact_batch``, and those of 1 by ``analytic`` too, and
prints a Markdown table. FOLDER holds ``NAME_train.npz`` and ``NAME_test.npz`` of ``cifar10`` and
``fashion_mnist``. The attacker knows the network, and the clients' normalisation or another one.
An answer is right if its pixels are within 60 dB of a private image, with that one's label.
*Wrongly proven* is proven and not right.

Networks and batches have seeds from ``--first-seed`` on; batches are of test images from number 100
on. Labels are inferred. One thread.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from flwr_leakage.attacks import Analytic, AttackJob, ExactBatch
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import SHAPES, Case, load, mlp, observe, score, train

NETWORKS: dict[str, tuple[Callable[[InputSpec], nn.Module], int]] = {
    "MLP 256": (mlp(256), 0),
    "MLP 160-96": (mlp(160, 96), 0),
    "MLP 4×96": (mlp(96, 96, 96, 96), 0),
    "MLP 160-96, trained": (mlp(160, 96), 3),
}
"""What makes each network, and the epochs of its training."""

DATASETS = ("cifar10", "fashion_mnist")
SIZES = (1, 4, 8)
TRAINING = 2000

STATISTICS = {
    "cifar10": (lab.CIFAR10_MEAN, lab.CIFAR10_STD),
    "fashion_mnist": ((0.2860,), (0.3530,)),
}
NORMALISATIONS = {
    "none": lambda name: ((0.0,), (1.0,)),
    "0.5, 0.5": lambda name: ((0.5,), (0.5,)),
    "statistics": STATISTICS.__getitem__,
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
)
"""How clients normalise, and what the attacker is told."""


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--first-seed", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--draws", type=int, default=5, help="of each network, data set and size")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a search, at most")
    given = lab.start(parser)
    exact = ExactBatch(SearchSettings(max_seconds=given.seconds))
    pixels = {
        name: Batch(*load(given.root, name, "test"))[lab.REPORTED_FROM :] for name in DATASETS
    }
    training = {name: Batch(*load(given.root, name, "train"))[:TRAINING] for name in DATASETS}
    lab.print_header(
        "clients' normalisation", "the attacker's", "batches", "answers", "right", "proven",
        "wrongly proven", "CPU s",
    )  # fmt: skip
    for own, told in ROWS:
        counts, batches = torch.zeros(4, dtype=torch.int64), 0
        with lab.Stopwatch() as watch:
            for name in DATASETS:
                spec, guess = (
                    InputSpec(SHAPES[name], lab.CLASSES, *NORMALISATIONS[each](name))
                    for each in (own, told)
                )
                for make, epochs in NETWORKS.values():
                    for draw in range(given.draws):
                        seed = given.first_seed + draw
                        torch.manual_seed(seed)
                        network = make(spec)
                        train(network, lab.normalize(training[name], spec), epochs)
                        gradient_map = GradientMap(network.eval())
                        order = torch.randperm(len(pixels[name]), generator=lab.generator(seed))
                        for size in SIZES:
                            truth = lab.normalize(pixels[name][order[:size]], spec)
                            seen = observe(gradient_map, truth, Case("", make, name, size))
                            job = AttackJob(gradient_map, guess, [seen], ThreatModel())
                            batches += 1
                            for attack in (exact, Analytic())[: 2 if size == 1 else 1]:
                                (found,) = attack(job)
                                judged = score(found, truth, gradient_map, spec, guess)
                                counts += torch.tensor([size, *judged])
        lab.print_row(own, told, batches, *counts.tolist(), f"{watch.seconds:.0f}")


if __name__ == "__main__":
    main()
