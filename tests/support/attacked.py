"""Small networks, and what a server sees of a client that trains one."""

from functools import cache

import torch
from torch import nn

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.records import Disclosure
from simulations.benchmarks import lab


def tiny_network(seed=0, channels=1, activation=nn.Sigmoid, classes=4):
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=2, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, classes),
    )
    for value in network.parameters():
        nn.init.uniform_(value, -0.5, 0.5)
    return network


@cache
def preset(name: str) -> Attack:
    """A preset as its file describes it, which is frozen and composed once."""
    return load_preset(name)


def observe(gradient_map, batch, schedule, *, disclose=False, **named):
    """What a server sees of an honest client, by the wire's arithmetic."""
    disclosed = Disclosure(targets=batch.targets) if disclose else Disclosure()
    return lab.observe(gradient_map, batch, schedule, disclosed=disclosed, **named)
