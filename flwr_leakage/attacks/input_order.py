"""The order and the scaling in which a linear layer takes the network's input.

A network may flatten its images in another order (``x.permute(0, 2, 3, 1).flatten(1)``), or first
normalise them itself. The inputs of its first linear layer then still determine the image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR


@dataclass(frozen=True)
class InputOrder:
    """The map ``h = a ∘ x[positions] + c`` from a flattened image x (n,) to a layer's input h.

    Attributes:
        positions: (n,) a permutation of the pixels.
        scale: a (n,), never zero.
        offset: c (n,).
    """

    positions: Tensor
    scale: Tensor
    offset: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the flattened images (…, n) of a layer's inputs (…, n)."""
        return self.moved((inputs - self.offset) / self.scale)

    def moved(self, values: Tensor) -> Tensor:
        """Return values (…, n) in the layer's order as values in the order of the pixels."""
        found = torch.empty_like(values)
        found[..., self.positions] = values
        return found


def input_orders(problem: Problem) -> list[tuple[LinearUse, InputOrder]]:
    """Return the linear layers of a pass that take the whole input, each with its ``InputOrder``.

    Four images are passed through the network. Zeros, ones and rising numbers determine offset,
    scale and positions, and random numbers check them.
    """
    like, size = problem.like, torch.Size(problem.spec.shape).numel()
    rising = torch.linspace(0, 1, size)
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(0))
    probes = torch.stack([torch.zeros(size), torch.ones(size), rising, drawn]).to(like)
    uses = traced(problem, probes.reshape(-1, *problem.spec.shape)).linear
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
    # A float32 pass may differ by this relative error.
    if not float((expected - drawn).abs().max()) <= FLOAT32_RELATIVE_ERROR * float(
        drawn.abs().max()
    ):
        return None
    return InputOrder(positions, scale, offset)
