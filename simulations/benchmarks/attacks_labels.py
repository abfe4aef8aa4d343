"""Share of a batch's labels that the update's last layer gives away, by method.

    python -m simulations.benchmarks.attacks_labels --root FOLDER

prints a Markdown row a network, its training epochs and a batch size: the share of labels found,
repetitions counted, and in brackets the share of batches without a mistake, for

``features``   this project's counts, with the softmax of the gradient's mean feature vector
``dummies``    the same, with the mean softmax of 64 random images
``public``     the same, with that of 64 public images (training images that the network never saw)
``LLG``        iDLG carried over to repeated classes (Wainakh et al. 2022)
``Yin``        the smallest entries of the last gradient (Yin et al. 2021): every class once at most

Batches are drawn from test images at random, so that classes repeat. BatchNorm is in train mode.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from flwr_leakage.attacks import ClassCounts, LabelImpact, Problem, pose, smallest_columns
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, LeNet, ResNet18, initialize
from flwr_leakage.records import Batch, InputSpec, ThreatModel
from simulations.benchmarks.attacks import CLASSES, NORMALISATION, SHAPE, load
from simulations.benchmarks.attacks_batch_norm import PUBLIC, accuracy, observe, train

Method = Callable[[Problem], Tensor]


def networks(width: int, generator: torch.Generator) -> dict[str, nn.Module]:
    """The networks, untrained."""
    return {
        "LeNet, U(±0.5)": initialize(
            LeNet(SHAPE, CLASSES, num_convolutions=3), "uniform", generator
        ),
        "LeNet, tanh": initialize(
            LeNet(SHAPE, CLASSES, num_convolutions=3, activation="tanh"), "default", generator
        ),
        "ConvNet": initialize(ConvNet(SHAPE, CLASSES, width), "default", generator),
        "ResNet-18": initialize(ResNet18(SHAPE, CLASSES, width), "default", generator),
    }


def methods(public: Tensor) -> dict[str, Method]:
    """Labels of a problem, by name."""

    def draw() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    return {
        "features": lambda problem: ClassCounts()(problem, draw()),
        "dummies": lambda problem: ClassCounts("dummies")(problem, draw()),
        "public": lambda problem: ClassCounts("dummies", public=public)(problem, draw()),
        "LLG": lambda problem: LabelImpact()(problem, draw()),
        "Yin": lambda problem: smallest_columns(
            problem.gradient[list(problem.gradient)[-2]], problem.num_samples
        ),
    }


def share(found: Tensor, truth: Tensor) -> float:
    """Labels in common, repetitions counted, over the batch size."""
    left, right = (torch.bincount(labels, minlength=CLASSES) for labels in (found, truth))
    return float(torch.minimum(left, right).sum()) / len(truth)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--width", type=int, default=8, help="of ConvNet and ResNet-18")
    parser.add_argument("--epochs", default="0,1,4")
    parser.add_argument("--trials", type=int, default=20, help="batches a row")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    spec = InputSpec(SHAPE, CLASSES, *NORMALISATION)
    pixels, labels = load(given.root, "train", 0, 5000)
    images = Batch(spec.normalize(pixels), labels)
    public, training = images.inputs[-PUBLIC:], images[:-PUBLIC]
    pixels, labels = load(given.root, "test", 0, 600)
    private = Batch(spec.normalize(pixels), labels)
    columns = methods(public)
    print(f"| network | epochs | accuracy | B | {' | '.join(columns)} |")
    print("|---|---|---|---|" + "---|" * len(columns), flush=True)
    generator = torch.Generator().manual_seed(given.seed)
    for name, network in networks(given.width, generator).items():
        trained = 0
        for epochs in map(int, given.epochs.split(",")):
            train(network.train(), training, epochs - trained)
            trained = epochs
            reached = accuracy(network, private)
            gradient_map = GradientMap(network, batch_norm="batch")
            for size in (8, 16):
                shares: dict[str, list[float]] = {column: [] for column in columns}
                for index in range(given.trials):
                    batch = private[torch.randperm(len(private), generator=generator)[:size]]
                    problem = pose(
                        gradient_map, spec, observe(gradient_map, batch, {}, index), ThreatModel()
                    )
                    for column, method in columns.items():
                        shares[column].append(share(method(problem), batch.targets))
                cells = [
                    f"{100 * sum(v) / len(v):.0f} % ({100 * sum(s == 1 for s in v) / len(v):.0f} %)"
                    for v in shares.values()
                ]
                print(
                    f"| {name} | {epochs} | {100 * reached:.0f} % | {size} | {' | '.join(cells)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
