"""Networks of the attack benchmarks, and gradients of real images through them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, LeNet, initialize
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update

SHAPE, CLASSES = (3, 32, 32), 10
NORMALISATION = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
NETWORKS = ("lenet", "lenet4", "relu", "relu-trained")
RELU_NETWORK = {
    "width": 16,
    "channel_multipliers": (1, 2, 2),
    "strides": (1, 2, 2),
    "pool_after": (),
    "use_batch_norm": False,
}


def load(root: Path, split: str, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and labels."""
    with np.load(root / f"cifar10_{split}.npz", allow_pickle=False) as file:
        images = torch.tensor(file["images"][first : first + count])
        labels = torch.tensor(file["labels"][first : first + count])
    return images.permute(0, 3, 1, 2).float() / 255, labels


def make_network(name: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """LeNet with three or four convolutions, or the ReLU network, untrained or trained."""
    torch.manual_seed(seed)
    if name.startswith("lenet"):
        network: nn.Module = LeNet(SHAPE, CLASSES, num_convolutions=4 if name == "lenet4" else 3)
        initialize(network, "uniform", torch.Generator().manual_seed(seed))
        return network
    network = ConvNet(SHAPE, CLASSES, **RELU_NETWORK)
    if name == "relu-trained":
        pixels, labels = load(root, "train", 0, 4000)
        inputs = spec.normalize(pixels)
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for _ in range(5):
            for chosen in torch.randperm(len(inputs)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[chosen]), labels[chosen]).backward()
                optimizer.step()
    return network.eval()


def observe(gradient_map: GradientMap, inputs: Tensor, label: Tensor, index: int) -> Observation:
    """The gradient of one image, as one SGD step of learning rate 1."""
    params, buffers = gradient_map.params, gradient_map.buffers
    gradient = gradient_map(params, Batch(inputs, label), buffers)
    delta = {name: -value.detach() for name, value in gradient.items()}
    return Observation(1, index, params, buffers, Update(delta, buffers, LocalSchedule(1.0), 1))
