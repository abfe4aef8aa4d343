"""Small networks, and what a server sees of a client that trains one."""

import torch
from torch import nn

from flwr_leakage.gradient_map import local_update
from flwr_leakage.records import Disclosure, Observation, Update


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


def observe(gradient_map, batch, schedule, *, client_id=0, server_round=1, disclose=False):
    """What a server sees of an honest client, by the wire's arithmetic."""
    params = gradient_map.params
    delta = local_update(gradient_map, params, batch, schedule, gradient_map.buffers)
    delta = {k: ((params[k] + v) - params[k]).detach() for k, v in delta.items()}
    return Observation(
        server_round=server_round,
        client_id=client_id,
        params=params,
        buffers=gradient_map.buffers,
        update=Update(delta, gradient_map.buffers, schedule, len(batch)),
        disclosed=Disclosure(targets=batch.targets) if disclose else Disclosure(),
    )
