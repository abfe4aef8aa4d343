"""What exact attacks networks of the other tables are open to, before any training, without data.

    python -m simulations.benchmarks.structure --seed 100

prints ``flwr_leakage.structure`` of CIFAR-10's shape; ``--attempt`` runs the attacks that apply on
the synthetic batch.
"""

import time

import torch
from torch import nn

from flwr_leakage import structure
from flwr_leakage.models import MLP, ConvNet, LeNet, ResNet18, initialize
from simulations.benchmarks import lab


def make_networks(seed: int) -> dict[str, tuple[nn.Module, int]]:
    """Networks with fresh weights, and the batch sizes that they are looked at with."""
    torch.manual_seed(seed)
    lenet = LeNet(lab.SHAPE, lab.CLASSES, num_convolutions=3)
    return {
        "LeNet, sigmoid": (initialize(lenet, "uniform", lab.generator(seed)), 1),
        "ReLU ConvNet": (lab.small_convnet(), 1),
        "ConvNet with max pooling, BatchNorm in eval mode": (
            ConvNet(lab.SHAPE, lab.CLASSES, width=16).eval(),
            1,
        ),
        "ResNet-18 of width 16, BatchNorm in eval mode": (
            ResNet18(lab.SHAPE, lab.CLASSES, width=16).eval(),
            1,
        ),
        "MLP 3×1000": (MLP(lab.SHAPE, lab.CLASSES, (1000, 1000, 1000)), 64),
    }


def main() -> None:
    """Read the command line, print."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the images")
    parser.add_argument("--attempt", action="store_true", help="run the attacks")
    parser.add_argument("--only", default="", help="beginning of a network's name")
    given = lab.start(parser)
    for name, (network, count) in make_networks(given.seed).items():
        if name.startswith(given.only):
            began = time.process_time()
            found = structure(network, lab.CIFAR10, count, attempt=given.attempt, seed=given.seed)
            print(f"{name}\n{found}\n{time.process_time() - began:.0f} CPU seconds\n", flush=True)


if __name__ == "__main__":
    main()
