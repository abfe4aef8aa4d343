"""How a linear layer takes the network's input: in which order, and after which scaling.

A network may flatten its images in another order (``x.permute(0, 2, 3, 1).flatten(1)``), or
normalise them itself before. What its first linear layer takes then tells the image all the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.linear import LinearUse, find_linear_layers
from flwr_leakage.attacks.problem import Problem

SAME = 1e-5
"""Relative difference up to which two numbers of a pass in single precision are the same."""


@dataclass(frozen=True)
class InputOrder:
    """``h = a ∘ x[positions] + c`` for images x, flattened.

    Attributes:
        positions: (n,) a permutation.
        scale: a (n,), never zero.
        offset: c (n,).
    """

    positions: Tensor
    scale: Tensor
    offset: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """The images (…, n) of a layer's inputs (…, n), both flattened."""
        return self.moved((inputs - self.offset) / self.scale)

    def moved(self, values: Tensor) -> Tensor:
        """Values of the layer's inputs (…, n) at the places of their pixels."""
        found = torch.empty_like(values)
        found[..., self.positions] = values
        return found


def input_orders(problem: Problem) -> list[tuple[LinearUse, InputOrder]]:
    """The linear layers that take the whole input, in the order of a pass, and how they do.

    It is found by the numbers that pass: by images of zeros, of ones, of rising numbers and of
    random ones, of which the last check what the others tell.
    """
    like, size = next(iter(problem.params.values())), torch.Size(problem.spec.shape).numel()
    rising = torch.linspace(0, 1, size)
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(0))
    probes = torch.stack([torch.zeros(size), torch.ones(size), rising, drawn]).to(like)
    with torch.no_grad():
        uses = find_linear_layers(problem, probes.reshape(-1, *problem.spec.shape))
    found = []
    for use in uses:
        order = _order(use.inputs, probes) if use.inputs.shape == probes.shape else None
        if order is not None:
            found.append((use, order))
    return found


def _order(inputs: Tensor, probes: Tensor) -> InputOrder | None:
    offset, full, ranked, drawn = inputs
    scale, size = full - offset, probes.shape[1]
    if not bool(scale.all()):
        return None
    positions = ((ranked - offset) / scale * (size - 1)).round().long()
    if not torch.equal(positions.sort().values, torch.arange(size).to(positions)):
        return None
    expected = scale * probes[3][positions] + offset
    if not float((expected - drawn).abs().max()) <= SAME * float(drawn.abs().max()):
        return None
    return InputOrder(positions, scale, offset)
