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

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flwr_leakage.attacks import ClassCounts, LabelImpact, Problem, pose, smallest_columns
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.models import ConvNet, LeNet, ResNet18, initialize
from flwr_leakage.records import ThreatModel
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
        "features": lambda problem: ClassCounts()(problem, lab.generator()),
        "dummies": lambda problem: ClassCounts("dummies")(problem, lab.generator()),
        "public": lambda problem: ClassCounts("dummies", public=public)(problem, lab.generator()),
        "LLG": lambda problem: LabelImpact()(problem, lab.generator()),
        "Yin": lambda problem: smallest_columns(
            problem.gradient[list(problem.gradient)[-2]], problem.num_samples
        ),
    }


def share(found: Tensor, truth: Tensor) -> float:
    """Labels in common, repetitions counted, over the batch size."""
    left, right = (torch.bincount(labels, minlength=lab.CLASSES) for labels in (found, truth))
    return float(torch.minimum(left, right).sum()) / len(truth)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--width", type=int, default=8, help="of ConvNet and ResNet-18")
    parser.add_argument("--epochs", default="0,1,4")
    parser.add_argument("--trials", type=int, default=20, help="batches a row")
    given = lab.start(parser)
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
            for size in (8, 16):
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
