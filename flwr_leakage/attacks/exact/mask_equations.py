"""The piecewise linear equations that proven masks of a ReLU layer give about the input.

Let z(x) be the preactivations of a ReLU layer, h(x) the input of that layer, and a its outputs.
Let the mask m be known but for open units. Then these equations hold to rounding:

    M₁ h(x) = T₁       from the weight gradient of the layer, its proven channels only;
    z(x) = a           for units that are on and whose value is told;
    z(x) ≥ 0           for other units that are on;
    z(x) ≤ 0           for units that are off;
    M₂ (m z(x)) = T₂   from the weight gradient of the layer behind. For open units, relu(z) stands
                       for m z.

The known outputs of the layer behind add further equations.

As m is given, only the ReLUs before the layer are still unknown, and x is mostly overdetermined.
Near the solution, Newton's method arrives in a few steps. The attacker sees the residual, and so
knows when the solution is exact. :mod:`flwr_leakage.attacks.exact.fading` leads from far away to
the neighbourhood of the solution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, per_channel
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.layer_equations import Knowledge
from flwr_leakage.attacks.exact.weight_equations import Whitened, root_mean_square
from flwr_leakage.attacks.network.blur import relu_parts


@dataclass(frozen=True)
class Gates:
    """The linear piece of the system that holds at an input.

    Attributes:
        before: slopes of the activations of each layer before the masked one.
        bound: 1 if z has a target value or violates its bound, so that there is a residual, else
            0; of the shape of the masked layer's outputs.
        passes: slopes of the masked layer's ReLUs, of the same shape.
        reached: weight of each residual of the layer behind, of the shape of that layer's outputs.
    """

    before: tuple[Tensor, ...]
    bound: Tensor
    passes: Tensor
    reached: Tensor

    def single(self) -> "Gates":
        """Return the same slopes and weights in single precision."""
        before = tuple(gate.float() for gate in self.before)
        return Gates(before, self.bound.float(), self.passes.float(), self.reached.float())


@dataclass(frozen=True)
class MaskEquations:
    """The equations of the module's docstring, each in units of its right-hand side.

    Attributes:
        before: the layers before the masked one.
        link: the masked layer.
        known: the facts about its outputs, of their shape (1, *output_shape).
        own: ``M₁ h = T₁``, in these units; ``None`` if no mask is proven.
        behind: the known outputs of the layer behind, and its gradient's equations.
        gradient: ``M₂ a = T₂``, in these units, arranged by the channels of a.
    """

    before: Sequence[Link]
    link: Link
    known: Known
    own: Whitened | None
    behind: Knowledge
    gradient: Whitened

    @classmethod
    def of(
        cls,
        before: Sequence[Link],
        link: Link,
        known: Known,
        own: Whitened | None,
        behind: Knowledge,
    ) -> "MaskEquations":
        """Return the system from equations in any units and facts of any shape."""
        gradient = behind.equations.of_channels(link.num_channels).in_units()
        known = known.map(lambda each: each.reshape(1, *link.output_shape))
        return cls(before, link, known, None if own is None else own.in_units(), behind, gradient)

    def residual(self, inputs: Tensor, blur: float = 0.0) -> tuple[Tensor, Gates]:
        """Return all residuals (1, R) at an input, and the linear piece that holds there.

        Args:
            inputs: x, (1, *shape).
            blur: ReLUs are averaged over noise of this standard deviation in the input of their
                layer. For open units of the masked layer it is half as large.
        """
        mask, valued = self.known.mask, self.known.valued
        features, slopes = inputs, []
        for link in self.before:
            features, slope = rectify(link, link.preactivation(features), blur)
            slopes.append(slope)
        z = self.link.preactivation(features)
        bound = valued | (mask.off & (z > 0)) | (mask.on & ~valued & (z <= 0))
        free, slope = rectify(self.link, z, blur / 2)
        outputs = mask.gate(z, free)
        behind = self.behind.link.preactivation(outputs)
        binds = self.behind.link.activation.binds(behind, self.behind.outputs)
        reached = binds.to(z.dtype) * self.behind.trust
        gates = Gates(tuple(slopes), bound.to(z.dtype), mask.gate(1.0, slope), reached)
        gaps = z - torch.where(valued, self.known.values, 0.0)
        parts = Parts(features, gaps, outputs, behind - self._behind_target)
        return self.collect(parts, gates, is_linear=False), gates

    def sum_of_squares(self, inputs: Tensor, blur: float = 0.0) -> float:
        """Return ‖r‖² of the residuals r at an input; see :meth:`residual`."""
        return float(self.residual(inputs, blur)[0].square().sum())

    def linearise(self, inputs: Tensor, blur: float = 0.0) -> tuple[Tensor, "LinearisedMasks"]:
        """Return the residuals at an input, and their derivative there; see :meth:`residual`."""
        residual, gates = self.residual(inputs, blur)
        return residual, LinearisedMasks(self, gates, inputs.shape[1:])

    def single(self) -> "MaskEquations":
        """Return the system with those matrices in single precision that derivatives need."""
        return replace(
            self,
            before=[link.single() for link in self.before],
            link=self.link.single(),
            own=None if self.own is None else self.own.single(),
            behind=replace(self.behind, link=self.behind.link.single()),
            gradient=self.gradient.single(),
        )

    def collect(self, parts: "Parts", gates: Gates, is_linear: bool) -> Tensor:
        """Return residuals (B, R) of the equations about h and a, of z, and of the layer behind.

        Args:
            parts: the quantities that the residuals are made of.
            gates: the linear piece of the system.
            is_linear: whether to leave out the right-hand sides, as for changes of the residuals.
        """
        results = []
        for equations, inputs in ((self.own, parts.features), (self.gradient, parts.outputs)):
            if equations is not None:
                entries = inputs.reshape(len(inputs), -1, equations.num_positions)
                products = entries @ equations.rows.T
                results.append(
                    (products if is_linear else products - equations.values.T).flatten(1)
                )
        if self.own is not None:
            results.append((gates.bound * parts.gaps / self._unit).flatten(1))
        results.append((gates.reached * parts.gaps_behind / self._unit_behind).flatten(1))
        return torch.cat(results, dim=1)

    @cached_property
    def _unit(self) -> float:
        """The unit of z's residuals: the root mean square of the masked layer's known values."""
        return float(root_mean_square(self.known.values[self.known.valued]))

    @cached_property
    def _known_behind(self) -> Tensor:
        """Booleans, true where outputs of the layer behind determine its preactivations."""
        return self.behind.link.activation.invertible(self.behind.outputs)

    @cached_property
    def _behind_target(self) -> Tensor:
        """Preactivations of the layer behind, or their bounds if its outputs leave them open."""
        return self.behind.link.activation.target(self.behind.outputs)

    @cached_property
    def _unit_behind(self) -> float:
        return float(root_mean_square(self._behind_target[self._known_behind]))


@dataclass(frozen=True)
class Parts:
    """The quantities at an input that residuals are made of, or their changes with the input.

    Each has a leading batch dimension.

    Attributes:
        features: h, the input of the masked layer.
        gaps: z minus its target.
        outputs: a, the outputs of the masked layer.
        gaps_behind: preactivations of the layer behind minus their target.
    """

    features: Tensor
    gaps: Tensor
    outputs: Tensor
    gaps_behind: Tensor


@dataclass(frozen=True)
class LinearisedMasks:
    """The derivative J of the residuals at an input, given by its products with vectors.

    Attributes:
        equations: the system.
        gates: the linear piece of the system that holds at the input.
        shape: the shape of one input.
    """

    equations: MaskEquations
    gates: Gates
    shape: torch.Size

    def push(self, steps: Tensor) -> Tensor:
        """Return J Δ, the changes (B, R) of the residuals for steps Δ (B, *shape) of the input."""
        equations, gates = self.equations, self.gates
        for link, slope in zip(equations.before, gates.before, strict=True):
            steps = slope * link.scaled(steps)
        z = equations.link.scaled(steps)
        outputs = gates.passes * z
        behind = equations.behind.link.scaled(outputs)
        return equations.collect(Parts(steps, z, outputs, behind), gates, is_linear=True)

    def pull_back(self, batch: int = 1) -> Callable[[Tensor], Tensor]:
        """Return the product with Jᵀ as a function (batch, R) ↦ (batch, *shape)."""
        zeros = torch.zeros(batch, *self.shape, dtype=self.gates.bound.dtype)
        pull = torch.func.vjp(self.push, zeros)[1]
        return lambda residual: pull(residual)[0]

    def normal_matrix(self, block: int = 128) -> Tensor:
        """Return JᵀJ (D, D) for inputs of D entries, in single precision.

        Args:
            block: number of columns that are computed at once.
        """
        single, size = self.single(), self.shape.numel()
        units = torch.eye(size, dtype=torch.float32).reshape(size, *self.shape)
        width = min(block, size)
        pull = single.pull_back(width)
        matrix = torch.empty(size, size)
        for first in [*range(0, size - width, width), size - width]:
            columns = slice(first, first + width)
            matrix[columns] = pull(single.push(units[columns])).reshape(width, size)
        return matrix

    def single(self) -> "LinearisedMasks":
        """Return the same J in single precision."""
        return LinearisedMasks(self.equations.single(), self.gates.single(), self.shape)


def rectify(link: Link, z: Tensor, blur: float) -> tuple[Tensor, Tensor]:
    """Return the activation of z and its slope, averaged over normal noise if it is a ReLU.

    The noise in z has the standard deviation that noise of standard deviation ``blur`` in the
    layer's input causes.

    Args:
        link: the layer.
        z: its preactivations (B, *output_shape).
        blur: standard deviation of the input's noise, ≥ 0; it changes ReLUs only.
    """
    if blur and link.activation.is_relu:
        width = per_channel((blur * link.gain).clamp_min(1e-12), z)
        return relu_parts(z, width)[:2]
    assert link.activation.slope is not None
    outputs = link.activation.function(z)
    return outputs, link.activation.slope(outputs)
