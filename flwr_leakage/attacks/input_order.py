"""How a linear layer takes the network's input: in which order, and after which scaling.

A network may flatten its images in another order (``x.permute(0, 2, 3, 1).flatten(1)``), or
normalise them itself before. What its first linear layer takes then tells the image all the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.linear_walk import LinearUse, find_linear_layers
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


def first_layer(problem: Problem, generator: torch.Generator) -> tuple[LinearUse, InputOrder]:
    """The first linear layer with a bias that takes the whole input, and how.

    It is found by the numbers that pass: by images of zeros, of ones, of rising numbers and of
    random ones, of which the last check what the others tell.

    Raises:
        ValueError: there is none.
    """
    like, size = next(iter(problem.params.values())), torch.Size(problem.spec.shape).numel()
    rising = torch.linspace(0, 1, size)
    probes = torch.stack(
        [torch.zeros(size), torch.ones(size), rising, torch.rand(size, generator=generator)]
    ).to(like)
    with torch.no_grad():
        uses = find_linear_layers(problem, probes.reshape(-1, *problem.spec.shape))
    for use in uses:
        if use.inputs.shape != probes.shape or use.bias is None:
            continue
        offset, full, ranked, drawn = use.inputs
        scale = full - offset
        if not bool(scale.all()):
            continue
        positions = ((ranked - offset) / scale * (size - 1)).round().long()
        if not torch.equal(positions.sort().values, torch.arange(size).to(positions)):
            continue
        expected = scale * probes[3][positions] + offset
        if float((expected - drawn).abs().max()) <= SAME * float(drawn.abs().max()):
            return use, InputOrder(positions, scale, offset)
    raise ValueError("no linear layer with bias takes the network's input.")
