"""The model and the data: nothing here knows of an audit."""

from functools import cache

import torch
from torch import nn

from flwr_leakage.data import embedded_mnist

LEARNING_RATE = 0.1


def network() -> nn.Sequential:
    """Two linear layers for digits (B, 1, 28, 28)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def digit(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The one digit of a client, and its label."""
    train, _ = embedded_mnist()
    batch = train.batch([partition])
    return batch.inputs, batch.targets
