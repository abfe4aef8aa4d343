"""One ReLU in the words of several models."""

import torch
from torch import nn
from torch.nn import functional as F


def in_place(z):
    z.relu_()
    return z


SPELLINGS = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "functional": F.relu,
    "functional in place": lambda z: F.relu(z, inplace=True),
    "torch": torch.relu,
    "method": lambda z: z.relu(),
    "method in place": in_place,
    "clamp": lambda z: z.clamp(min=0),
    "clamp_min": lambda z: torch.clamp_min(z, 0),
    "clamp with a tensor": lambda z: z.clamp(min=torch.zeros(())),
    "threshold": lambda z: torch.threshold(z, 0, 0),
    "maximum": lambda z: torch.maximum(z, torch.zeros_like(z)),
    "maximum, zeros first": lambda z: torch.maximum(torch.zeros_like(z), z),
    "max": lambda z: torch.max(z, torch.tensor(0.0)),
    "max, method": lambda z: z.max(z * 0),
    "fmax": lambda z: torch.fmax(z, other=torch.zeros(1)),
    "where": lambda z: torch.where(z > 0, z, torch.zeros_like(z)),
    "where, a number": lambda z: torch.where(z >= 0, z, 0.0),
    "where, zeros first": lambda z: torch.where(z <= 0, 0.0, z),
    "where, method": lambda z: z.where(z > 0, 0.0),
    "masked_fill": lambda z: z.masked_fill(z < 0, 0.0),
    "product": lambda z: z * (z > 0),
    "product, mask first": lambda z: (z > 0).to(z) * z,
    "leaky": lambda z: F.leaky_relu(z, 0.0),
    "leaky in place": lambda z: F.leaky_relu_(z, 0.0),
    "leaky module": nn.LeakyReLU(0.0),
    "prelu": lambda z: F.prelu(z, torch.zeros(1, dtype=z.dtype)),
    "prelu, channels": lambda z: F.prelu(z, torch.zeros(z.shape[1], dtype=z.dtype)),
    "rrelu": lambda z: F.rrelu(z, 0.0, 0.0),
}
"""Each may write into its input."""
