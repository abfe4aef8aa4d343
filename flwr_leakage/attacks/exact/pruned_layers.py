"""What pruned gradients tell of one sample's pass through linear layers with ReLUs between them.

The gradient of a linear layer ``u = W h + c`` is ``e [h, 1]ᵀ`` for one sample, with e its outputs'
error. Of pruned gradients

* an entry that was kept is exact, or has noise that shows in how far it is from one product: the
  bias's give errors, with which rows give inputs, with which columns give errors of further rows;
* an entry that is zero has ``|e_i h_j| ≤ τ``, with τ the smallest magnitude that its tensor kept;
* an output whose error or whose feature behind was kept is on;
* the errors behind give each unit's error if it is on. One that pruning would have kept, and did
  not, belongs to a unit that is off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.network.linear import LinearUse, find_linear_layers
from flwr_leakage.attacks.problem import Problem

ROUGH = 0.1
"""Relative distance from an outer product up to which it is one with noise."""

FLOAT = 1e-6
"""Least deviation of what was kept, in units of the layer's largest input: float32's rounding."""

NOISE = 10.0
"""So many deviations beyond a threshold are noise."""

ROUNDS = 50
"""Times that inputs tell errors and errors inputs; what is not told by then is taken as unknown."""

TINIEST = 1e-300
"""Instead of a sum of squares that is zero; its entry is not seen."""


@dataclass(frozen=True)
class PrunedLayer:
    """A linear layer, and what its gradient of one sample tells.

    Attributes:
        matrix: W (m, n).
        offset: c (m,).
        errors: e (m,), zero where not seen.
        has_error: which of them are seen (m,).
        inputs: h (n,), zero where not seen.
        seen: which of them are (n,).
        deviations: of the inputs that are seen, by noise of the gradient (n,).
        noise: deviation of the gradient's entries.
        threshold: τ; infinite where larger entries are zero than others that were kept.
    """

    matrix: Float[Tensor, "m n"]
    offset: Float[Tensor, " m"]
    errors: Float[Tensor, " m"]
    has_error: Bool[Tensor, " m"]
    inputs: Float[Tensor, " n"]
    seen: Bool[Tensor, " n"]
    deviations: Float[Tensor, " n"]
    noise: float
    threshold: float

    @classmethod
    def of(
        cls,
        matrix: Float[Tensor, "m n"],
        offset: Float[Tensor, " m"],
        weight: Float[Tensor, "m n"],
        bias: Float[Tensor, " m"],
    ) -> "PrunedLayer":
        """Read errors and inputs off what was kept.

        Args:
            matrix: W.
            offset: c.
            weight: ∂L/∂W.
            bias: ∂L/∂c.

        Raises:
            ValueError: nothing of the bias or of the weight is kept, or the entries are not those
                of one sample.
        """
        if not bool(bias.any()) or not bool(weight.any()):
            raise ValueError("nothing is kept of the layer's weight or of its bias.")
        both = torch.cat([weight, bias[:, None]], 1)
        kept = (both != 0).to(both)
        row = torch.zeros_like(both[0])
        row[-1] = 1.0
        known = row > 0
        for _ in range(ROUNDS):
            sizes = kept @ row.square()
            errors = torch.where(sizes > 0, both @ row / sizes.clamp_min(TINIEST), 0.0)
            weights = kept.T @ errors.square()
            row = torch.where(weights > 0, both.T @ errors / weights.clamp_min(TINIEST), 0.0)
            row = row / row[-1]
            if torch.equal(weights > 0, known):
                break
            known = weights > 0
        product = errors[:, None] * row
        left = kept * (product - both)
        if not float(left.norm()) <= ROUGH * float(both.norm()):
            raise ValueError("what is kept of the layer's gradient is not of one sample.")
        surplus = float(kept.sum()) - float((sizes > 0).sum() + known.sum())
        noise = float(left.norm()) / max(surplus, 1.0) ** 0.5
        deviations = noise * weights[:-1].clamp_min(TINIEST).rsqrt()
        deviations = deviations.clamp_min(FLOAT * float(row[:-1].abs().max()))
        threshold = float(weight[weight != 0].abs().min())
        pruned = product[:, :-1][weight == 0]
        if len(pruned) and float(pruned.abs().max()) > threshold * (1 + FLOAT) + NOISE * noise:
            threshold = math.inf  # magnitudes are not what decided
        return cls(
            matrix,
            offset,
            errors,
            sizes > 0,
            row[:-1],
            known[:-1],
            torch.where(known[:-1], deviations, 0.0),
            noise,
            threshold,
        )

    @property
    def bound(self) -> float:
        """What inputs that are not seen are at most, in magnitude."""
        return (self.threshold + NOISE * self.noise) / float(self.errors.abs().max())

    @property
    def error_bound(self) -> float:
        """What errors that are not seen are at most, in magnitude."""
        return (self.threshold + NOISE * self.noise) / float(self.inputs.abs().max())

    def doubt(self, of_others: Tensor | float) -> Tensor:
        """How far errors may be off (m,): by noise where they are seen, else by what is given."""
        own = NOISE * self.noise / float(self.inputs.abs().max())
        others = torch.as_tensor(of_others).to(self.errors).expand_as(self.errors)
        return others.masked_fill(self.has_error, own)


@dataclass(frozen=True)
class PrunedPass:
    """The first layers of a pass, each the next one's only input but for a ReLU.

    Attributes:
        layers: at least one, in the order of the pass.
    """

    layers: Sequence[PrunedLayer]

    @classmethod
    def of(cls, problem: Problem, first: LinearUse, generator: torch.Generator) -> "PrunedPass":
        """Read the layers from the first one on, as far as ReLUs alone stand between them.

        Args:
            problem: one sample in one plain step.
            first: the layer that takes the input.
            generator: of the images that tell what stands between layers.

        Raises:
            ValueError: the first layer tells nothing; see :meth:`PrunedLayer.of`.
        """
        like = problem.params[first.weight]
        probes = torch.randn(8, *problem.spec.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            uses = find_linear_layers(problem, probes.to(like))
        place = [use.weight for use in uses].index(first.weight)
        layers = [_read(problem, uses[place])]
        for use, following in zip(uses[place:], uses[place + 1 :], strict=False):
            rectified = use.outputs.clamp_min(0)
            if rectified.shape != following.inputs.shape or following.bias is None:
                break
            if not torch.equal(rectified, following.inputs):
                break
            if not {following.weight, following.bias} <= problem.gradient.keys():
                break
            try:
                layers.append(_read(problem, following))
            except ValueError:
                break  # what the layers before it tell holds without it
        return cls(layers)

    @cached_property
    def states(self) -> list[tuple[Tensor, Tensor]]:
        """Which units of each layer but the last are on, and which are off (m,), for certain."""
        last = self.layers[-1]
        errors = last.errors
        doubt = last.doubt(last.error_bound)
        found = []
        pairs = list(zip(self.layers, self.layers[1:], strict=False))
        for layer, following in reversed(pairs):
            own = following.matrix.T @ errors
            own_doubt = following.matrix.abs().T @ doubt
            on = layer.has_error | following.seen
            off = ~on & (own.abs() - own_doubt > (1 + FLOAT) * layer.error_bound)
            found.append((on, off))
            errors = torch.where(layer.has_error, layer.errors, torch.where(on, own, 0.0))
            unsure = torch.where(on, own_doubt, own.abs() + own_doubt)
            doubt = layer.doubt(unsure.clamp_max(layer.error_bound)).masked_fill(off, 0.0)
        return found[::-1]


def _read(problem: Problem, use: LinearUse) -> PrunedLayer:
    assert use.bias is not None
    params, gradient = problem.params, problem.gradient
    return PrunedLayer.of(
        params[use.weight], params[use.bias], gradient[use.weight], gradient[use.bias]
    )
