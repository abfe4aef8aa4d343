"""What proven masks of a ReLU layer tell exactly about the input: a piecewise linear system.

Let z(x) be the preactivations of a ReLU layer, h(x) the input of that layer, and let the masks
m of some of its channels be proven. Then three sets of equations hold to rounding:

    M₁ h(x) = T₁              the weight gradient of the layer, of proven channels;
    z(x) = a, z(x) ≤ 0        where the mask's values are determined, and where it is zero;
    M₂ (m z(x)) = T₂          the weight gradient of the layer behind, with relu(z) for m z in
                              channels that are not proven; and that layer's own outputs.

As m is given, only the ReLUs before the layer are left in the way, and x is mostly overdetermined:
close to the solution Newton's method for this system ends there in a few steps. Its residual is
the attacker's to see, so it is known when the solution is exact. From far away
:mod:`flwr_leakage.attacks.exact.fading` comes close.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, per_channel
from flwr_leakage.attacks.exact.layer_equations import Knowledge
from flwr_leakage.attacks.exact.mask_values import Masks
from flwr_leakage.attacks.exact.weight_equations import Whitened, root_mean_square


@dataclass(frozen=True)
class Gates:
    """Which piece of the piecewise linear system an input is on.

    Attributes:
        before: slopes of the activations of the layers before the masked one, of their shapes.
        bound: 1 where a residual holds z to its target, (1, *shape) of the masked layer, else 0.
        passes: slopes of the masked layer's ReLUs, of the same shape.
        reached: the weight of each residual of the layer behind, (1, *shape) of that.
    """

    before: tuple[Tensor, ...]
    bound: Tensor
    passes: Tensor
    reached: Tensor

    def single(self) -> "Gates":
        """The same in single precision."""
        before = tuple(gate.float() for gate in self.before)
        return Gates(before, self.bound.float(), self.passes.float(), self.reached.float())


@dataclass(frozen=True)
class MaskEquations:
    """The equations of the module's docstring, each set in units of its right-hand side.

    Attributes:
        before: the layers before the masked one.
        link: the layer whose ReLUs have the masks.
        masks: of that layer; the proven ones are used.
        own: ``M₁ h = T₁``, in units; ``None`` if no mask is proven.
        behind: what is known of the layer behind: its gradient's equations and its outputs.
        gradient: ``M₂ a = T₂``, in units, for the channels of a.
    """

    before: Sequence[Link]
    link: Link
    masks: Masks
    own: Whitened | None
    behind: Knowledge
    gradient: Whitened

    @classmethod
    def of(
        cls,
        before: Sequence[Link],
        link: Link,
        masks: Masks,
        own: Whitened | None,
        behind: Knowledge,
    ) -> "MaskEquations":
        """Set equations in units."""
        gradient = behind.equations.of_channels(len(masks.certain)).in_units()
        return cls(before, link, masks, None if own is None else own.in_units(), behind, gradient)

    def residual(self, inputs: Tensor, blur: float = 0.0) -> tuple[Tensor, Gates]:
        """All residuals at inputs (1, *shape), (1, R), and where the piecewise linear map is.

        Args:
            inputs: x.
            blur: standard deviation of noise in the input of each layer over which its ReLUs are
                averaged; half of it for ReLUs whose masks are sought.
        """
        masks, shape = self.masks, (1, *self.link.output_shape)
        features, slopes = inputs, []
        for link in self.before:
            features, slope = rectify(link, link.preactivation(features), blur)
            slopes.append(slope)
        z = self.link.preactivation(features)
        certain = masks.certain[:, None]
        positive = z.reshape(masks.active.shape) > 0
        bound = torch.where(masks.determined, masks.active | positive, masks.active & ~positive)
        bound = (bound & certain).to(z.dtype).reshape(shape)
        free, slope = rectify(self.link, z, blur / 2)
        active = masks.active.to(z.dtype)
        passes = torch.where(certain, active, slope.reshape(active.shape)).reshape(shape)
        is_sought = (~certain).expand(active.shape).reshape(shape)
        outputs = torch.where(is_sought, free, passes * z)
        target = torch.where(masks.valued, masks.features, 0.0).reshape(shape)
        behind = self.behind.link.preactivation(outputs)
        reached = (self._known_behind | (behind > 0)).to(z.dtype) * self.behind.trust
        gates = Gates(tuple(slopes), bound, passes, reached)
        parts = Parts(features, z - target, outputs, behind - self._behind_target)
        return self.collect(parts, gates, is_linear=False), gates

    def sum_of_squares(self, inputs: Tensor, blur: float = 0.0) -> float:
        """‖r‖², see ``residual``."""
        return float(self.residual(inputs, blur)[0].square().sum())

    def linearise(self, inputs: Tensor, blur: float = 0.0) -> tuple[Tensor, "LinearisedMasks"]:
        """The residuals at inputs, and these to first order."""
        residual, gates = self.residual(inputs, blur)
        return residual, LinearisedMasks(self, gates, inputs.shape[1:])

    def single(self) -> "MaskEquations":
        """The same in single precision, for ``LinearisedMasks``."""
        return replace(
            self,
            before=[link.single() for link in self.before],
            link=self.link.single(),
            own=None if self.own is None else self.own.single(),
            behind=replace(self.behind, link=self.behind.link.single()),
            gradient=self.gradient.single(),
        )

    def collect(self, parts: "Parts", gates: Gates, is_linear: bool) -> Tensor:
        """Residuals (B, R): from h; from a; from z less its target; and likewise one layer on.

        Args:
            parts: what they are made of.
            gates: where the piecewise linear map is.
            is_linear: whether the equations' right-hand sides are left out, for changes.
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
        """Of the masked layer's known values."""
        return float(root_mean_square(self.masks.features[self.masks.valued]))

    @cached_property
    def _known_behind(self) -> Tensor:
        """Where the outputs of the layer behind tell its preactivations."""
        return self.behind.link.activation.invertible(self.behind.outputs)

    @cached_property
    def _behind_target(self) -> Tensor:
        """Preactivations where the outputs tell them, else the bound 0."""
        values = self.behind.link.activation.inverse(self.behind.outputs)
        return torch.where(self._known_behind, values, 0.0)

    @cached_property
    def _unit_behind(self) -> float:
        return float(root_mean_square(self._behind_target[self._known_behind]))


@dataclass(frozen=True)
class Parts:
    """What residuals are made of, at an input or for a change of it; each with a batch in front.

    Attributes:
        features: h, the input of the masked layer.
        gaps: z less its target.
        outputs: a, of the masked layer.
        gaps_behind: preactivations of the layer behind less their target.
    """

    features: Tensor
    gaps: Tensor
    outputs: Tensor
    gaps_behind: Tensor


@dataclass(frozen=True)
class LinearisedMasks:
    """The equations to first order about an input: J, by its products.

    Attributes:
        equations: the system.
        gates: the piece of it that the input is on.
        shape: of one input.
    """

    equations: MaskEquations
    gates: Gates
    shape: torch.Size

    def push(self, steps: Tensor) -> Tensor:
        """J Δ: the change (B, R) of the residuals with steps Δ (B, *shape) of the inputs."""
        equations, gates = self.equations, self.gates
        for link, slope in zip(equations.before, gates.before, strict=True):
            steps = slope * link.scaled(steps)
        z = equations.link.scaled(steps)
        outputs = gates.passes * z
        behind = equations.behind.link.scaled(outputs)
        return equations.collect(Parts(steps, z, outputs, behind), gates, is_linear=True)

    def pull_back(self, batch: int = 1) -> Callable[[Tensor], Tensor]:
        """The product with the transpose, (batch, R) ↦ (batch, *shape)."""
        zeros = torch.zeros(batch, *self.shape, dtype=self.gates.bound.dtype)
        pull = torch.func.vjp(self.push, zeros)[1]
        return lambda residual: pull(residual)[0]

    def normal_matrix(self, block: int = 128) -> Tensor:
        """JᵀJ (D, D) in single precision; ``block`` columns are computed at once."""
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
        """The same in single precision."""
        return LinearisedMasks(self.equations.single(), self.gates.single(), self.shape)


def rectify(link: Link, z: Tensor, blur: float) -> tuple[Tensor, Tensor]:
    """The activation of z and its slope; with a blur, those of a ReLU are means over noise.

    E max(z + n, 0) = z Φ(z/σ) + σ φ(z/σ), with the slope Φ(z/σ), where n is normal with the
    standard deviation σ that noise of standard deviation ``blur`` in the layer's input makes.

    Args:
        link: the layer.
        z: its preactivations (B, *output_shape).
        blur: 0 for none; activations other than ReLU have none.
    """
    if not blur or not link.activation.has_kink:
        outputs = link.activation.function(z)
        return outputs, link.activation.slope(outputs)
    deviation = per_channel((blur * link.gain).clamp_min(1e-12), z)
    ratio = z / deviation
    density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
    slope = torch.special.ndtr(ratio)
    return z * slope + deviation * density, slope
