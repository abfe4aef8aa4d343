"""One sample's pass through linear layers with ReLUs, as far as pruned gradients determine it.

The gradient of a linear layer ``u = W h + c`` is ``e [h, 1]ᵀ`` for one sample, with e the error of
its outputs. Pruned gradients give these facts:

* A kept entry is exact, or its noise shows in its distance from the product ``e [h, 1]ᵀ``. Kept
  bias entries give errors. These errors and kept entries of their rows give inputs. These inputs
  and kept entries of their columns give errors of further rows.
* A zero entry has ``|e_i h_j| ≤ τ``, with τ the smallest magnitude that its tensor kept.
* A unit is on if its error or its entry in the next layer's input was kept.
* The next layer's errors give the error that each unit has if it is on. If pruning would have kept
  that error, but the unit's gradient is zero, the unit is off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.clipped import without_clipped
from flwr_leakage.attacks.exact.known import Known, Mask, outer_product
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_DEVIATION, NOISE_DEVIATIONS


@dataclass(frozen=True)
class PrunedLayer:
    """A linear layer, with the errors and inputs of one sample that its pruned gradient gives.

    Attributes:
        matrix: W (m, n).
        offset: c (m,).
        errors: e (m,), zero if unknown.
        has_error: booleans (m,), true for the known errors.
        inputs: h (n,), zero if unknown.
        seen: booleans (n,), true for the known inputs.
        deviations: standard deviations (n,) of the known inputs through the gradient's noise, zero
            for unknown inputs.
        noise: standard deviation of the gradient's entries.
        threshold: τ; infinite if pruning removed larger entries than it kept.
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
        """Return the layer with the errors and inputs that its kept entries give.

        Args:
            matrix: W (m, n).
            offset: c (m,).
            weight: ∂L/∂W (m, n), zero where entries were pruned.
            bias: ∂L/∂c (m,), zero where entries were pruned.

        Raises:
            ValueError: nothing of the bias or of the weight is kept, or the entries are not those
                of one sample.
        """
        if not bool(bias.any()) or not bool(weight.any()):
            raise ValueError("nothing is kept of the layer's weight or of its bias.")
        both = torch.cat([weight, bias[:, None]], 1)
        kept = (both != 0).to(both)
        errors, inputs, unit = outer_product(both, kept)
        row = torch.cat([inputs, inputs.new_ones(1)])
        known = torch.cat([unit.isfinite(), torch.ones_like(bias[:1], dtype=torch.bool)])
        has_error = kept @ known.to(kept) > 0
        product = errors[:, None] * row
        left = kept * (product - both)
        # A larger distance from an outer product is no noise (chosen on development draws).
        if not float(left.norm()) <= 0.1 * float(both.norm()):
            raise ValueError("the kept entries do not fit one sample's gradient.")
        surplus = float(kept.sum()) - float(has_error.sum() + known.sum())
        noise = float(left.norm()) / max(surplus, 1.0) ** 0.5
        deviations = (noise * unit).clamp_min(FLOAT32_DEVIATION * float(inputs.abs().max()))
        threshold = float(weight[weight != 0].abs().min())
        pruned = product[:, :-1][weight == 0]
        if (
            len(pruned)
            and float(pruned.abs().max())
            > threshold * (1 + FLOAT32_DEVIATION) + NOISE_DEVIATIONS * noise
        ):
            threshold = math.inf  # pruning did not decide by magnitudes
        return cls(
            matrix,
            offset,
            errors,
            has_error,
            inputs,
            known[:-1],
            torch.where(known[:-1], deviations, 0.0),
            noise,
            threshold,
        )

    @property
    def bound(self) -> float:
        """Largest magnitude that an unknown input may have."""
        return (self.threshold + NOISE_DEVIATIONS * self.noise) / float(self.errors.abs().max())

    @property
    def error_bound(self) -> float:
        """Largest magnitude that an unknown error may have."""
        return (self.threshold + NOISE_DEVIATIONS * self.noise) / float(self.inputs.abs().max())

    def doubt(self, of_others: Tensor | float) -> Tensor:
        """Return bounds (m,) on the error of e: noise where e is known, ``of_others`` elsewhere.

        Args:
            of_others: bound for the unknown errors, one for all or (m,).
        """
        own = NOISE_DEVIATIONS * self.noise / float(self.inputs.abs().max())
        others = torch.as_tensor(of_others).to(self.errors).expand_as(self.errors)
        return others.masked_fill(self.has_error, own)


@dataclass(frozen=True)
class PrunedPass:
    """The first layers of a pass, with nothing but ReLUs between them.

    Attributes:
        layers: at least one layer, in the order of the pass.
    """

    layers: Sequence[PrunedLayer]

    @classmethod
    def of(cls, problem: Problem, first: LinearUse, generator: torch.Generator) -> "PrunedPass":
        """Return the layers from ``first`` on, as long as only ReLUs stand between them.

        Args:
            problem: the update of one sample in one plain step.
            first: the layer that takes the network's input.
            generator: draws the images whose passes show what stands between layers.

        Raises:
            ValueError: the first layer's gradient gives no input; see :meth:`PrunedLayer.of`.
        """
        like = problem.params[first.weight]
        probes = torch.randn(8, *problem.spec.shape, generator=generator, dtype=torch.float64)
        uses = traced(problem, probes.to(like)).linear
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
                break  # the layers before it hold without it
        return cls(layers)

    @cached_property
    def features(self) -> list[Known]:
        """The facts about the outputs (m,) of the ReLU behind each layer but the last."""
        last = self.layers[-1]
        errors = last.errors
        doubt = last.doubt(last.error_bound)
        found = []
        for layer, following in reversed(list(pairwise(self.layers))):
            own = following.matrix.T @ errors
            own_doubt = following.matrix.abs().T @ doubt
            on = layer.has_error | following.seen
            off = ~on & (own.abs() - own_doubt > (1 + FLOAT32_DEVIATION) * layer.error_bound)
            bounds = torch.full_like(own, following.bound).masked_fill(following.seen | off, 0.0)
            found.append(Known(following.inputs, bounds, Mask(on, off)))
            errors = torch.where(layer.has_error, layer.errors, torch.where(on, own, 0.0))
            unsure = torch.where(on, own_doubt, own.abs() + own_doubt)
            doubt = layer.doubt(unsure.clamp_max(layer.error_bound)).masked_fill(off, 0.0)
        return found[::-1]


def _read(problem: Problem, use: LinearUse) -> PrunedLayer:
    assert use.bias is not None
    params, gradient = problem.params, without_clipped(problem.gradient)
    return PrunedLayer.of(
        params[use.weight], params[use.bias], gradient[use.weight], gradient[use.bias]
    )
