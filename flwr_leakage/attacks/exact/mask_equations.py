"""State the equations for the input that proven masks of a ReLU layer give.

Let z(x) be the preactivations of a ReLU layer at the network's input x, h(x) the input of that
layer, and a its outputs. The mask m is 1 for units that are on and 0 for units that are off; *open*
units have an unknown state. M₁ and M₂ are known matrices, and T₁ and T₂ known right sides. Then
these equations, which are piecewise linear in x, hold to rounding:

    M₁ h(x) = T₁       from the weight gradient of the layer, its proven channels only;
    z(x) = a           for units that are on and whose value is known;
    z(x) ≥ 0           for other units that are on;
    z(x) ≤ 0           for units that are off;
    M₂ (m z(x)) = T₂   from the weight gradient of the layer behind. For open units, relu(z) stands
                       for m z.

The known outputs of the layer behind give further equations. As m is given, only the states of the
ReLUs before the layer are still unknown, and x is mostly overdetermined. Near the solution,
Newton's method takes a few steps, and the residual shows if the solution is exact.
:mod:`flwr_leakage.attacks.exact.relu_fit` finds the solution from a start that is far away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.chain import LEAST_SINGULAR, Level, Link, features_of, per_channel
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.masks import PROOF, MaskEvidence, proven_channels
from flwr_leakage.attacks.exact.weight_equations import Whitened, root_mean_square
from flwr_leakage.attacks.network.blur import relu_parts
from flwr_leakage.attacks.solve.linearization import Linearized

NEGLIGIBLE = 1e-6
"""Equations of a weight gradient are left out if their singular value is below this share of the
largest. They belong to the layer whose ReLU mask is known. :meth:`Whitened.faded` lowers the weight
of equations already below the share ``LEAST_SINGULAR``; at ``NEGLIGIBLE`` 1 % of the weight is
left, so that a smaller share would change little."""


@dataclass(frozen=True)
class MaskEquations:
    """The equations for the network's input that the known mask of a ReLU layer gives.

    With the layer's input h, preactivations z and outputs a, they are ``M₁ h = T₁`` and ``M₂ a =
    T₂``, whose matrices and right sides follow from the gradients of the layer's weight and of the
    next one's; ``z = a`` where a is known to be positive; the signs of z that the mask states
    elsewhere; and the known outputs of the next layer. All are piecewise linear in the network's
    input. Each of these sets is divided by the root mean square of its right side.

    Attributes:
        before: the layers before the masked one.
        link: the masked layer, with input h and outputs a.
        known: the known outputs of the layer and the states of its units, (1, *output_shape).
        own: ``M₁ h = T₁`` from the layer's weight gradient, divided by the root mean square of T₁;
            ``None`` if no mask is proven.
        behind: the layer that takes a, with its known outputs, and the equations of its gradient.
        gradient: ``M₂ a = T₂`` from the weight gradient of the layer ``behind``, divided by the
            root mean square of T₂, and arranged by the channels of a.
    """

    before: Sequence[Link]
    link: Link
    known: Known
    own: Whitened | None
    behind: Level
    gradient: Whitened

    @classmethod
    def of(
        cls, before: Sequence[Link], link: Link, known: Known, own: Whitened | None, behind: Level
    ) -> "MaskEquations":
        """Return the equations for the network's input, with the given facts scaled and reshaped.

        ``before`` are the layers before the masked one, ``link``. ``known`` are its known outputs
        and the states of its units, in any shape. ``own`` is ``M₁ h = T₁`` from its weight
        gradient, in any units; ``None`` if no mask is proven. ``behind`` is the next layer with its
        known outputs, and the equations of its gradient.
        """
        gradient = behind.equations.of_channels(link.num_channels).in_units()
        known = known.map(lambda each: each.reshape(1, *link.output_shape))
        return cls(before, link, known, None if own is None else own.in_units(), behind, gradient)

    def residual(self, inputs: Tensor, blur: float = 0.0) -> Tensor:
        """Return all residuals (1, R) of the equations at an input x (1, *shape) of the network.

        Each ReLU is replaced by its mean over normal noise of standard deviation ``blur`` in the
        input of its layer. In the masked layer, this concerns only the units of unknown state, and
        the noise has half this deviation.
        """
        return self.linearise(inputs, blur).value

    def sum_of_squares(self, inputs: Tensor, blur: float = 0.0) -> float:
        """Return the sum ‖r‖² of the equations' squared residuals at an input x (1, *shape).

        Each ReLU is replaced by its mean over noise of standard deviation ``blur`` in its layer's
        input.
        """
        return float(self.residual(inputs, blur).square().sum())

    def linearise(self, inputs: Tensor, blur: float = 0.0, batch: int = 1) -> Linearized:
        """Return the equations' residuals, linearised at an input x (1, *shape) of the network.

        The result holds the residuals (1, R) and gives products with their derivative J by x. A
        product with Jᵀ takes ``batch`` vectors at once. ``blur`` is the standard deviation of the
        noise over which ReLUs are averaged, in their layer's input.
        """
        mask, valued, last = self.known.mask, self.known.valued, self.behind.link
        features, slopes = inputs, []
        for link in self.before:
            features, slope = rectify(link, link.preactivation(features), blur)
            slopes.append(slope)
        z = self.link.preactivation(features)
        free, slope = rectify(self.link, z, blur / 2)
        outputs, passes = mask.gate(z, free), mask.gate(1.0, slope)
        # If a unit's output is not known, only a preactivation whose sign contradicts the mask has
        # a residual.
        bound = (valued | (mask.off & (z > 0)) | (mask.on & ~valued & (z <= 0))).to(z)
        bound = bound / self._unit
        behind = last.preactivation(outputs)
        known = self.behind.known
        reached = (last.activation.binds(behind, known.values) & known.told).to(z)
        reached = reached / self._unit_behind
        gaps = z - torch.where(valued, self.known.values, 0.0)
        missed = behind - last.activation.target(known.values)

        def joined(features: Tensor, gaps: Tensor, outputs: Tensor, missed: Tensor) -> Tensor:
            parts = [self.gradient.products(outputs)]
            if self.own is not None:
                parts += [self.own.products(features), bound * gaps]
            return torch.cat([part.flatten(1) for part in [*parts, reached * missed]], dim=1)

        def push(steps: Tensor) -> Tensor:
            for link, slope in zip(self.before, slopes, strict=True):
                steps = slope * link.scaled(steps)
            z = self.link.scaled(steps)
            return joined(steps, z, passes * z, last.scaled(passes * z))

        @cache
        def pulled() -> Callable[[Tensor], tuple[Tensor]]:
            zeros = inputs.new_zeros(batch, *inputs.shape[1:])
            found: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(push, zeros)[1]
            return found

        value = joined(features, gaps, outputs, missed)
        stated = [each.values.T.flatten() for each in (self.gradient, self.own) if each is not None]
        right = torch.cat(stated)  # the right-hand sides of ``gaps`` and ``missed`` are zero
        value = value - F.pad(right, (0, value.shape[1] - len(right)))
        return Linearized(value, push, lambda dual: pulled()(dual)[0])

    @cached_property
    def _unit(self) -> float:
        """The root mean square of the known outputs of the layer whose ReLU mask is given.

        The residuals of that layer's preactivations are divided by it.
        """
        return float(root_mean_square(self.known.values[self.known.valued]))

    @cached_property
    def _unit_behind(self) -> float:
        """The root mean square of the known preactivations of the layer that the masked one feeds.

        The residuals of these preactivations are divided by it.
        """
        activation, outputs = self.behind.link.activation, self.behind.known.values
        known = activation.target(outputs)[activation.invertible(outputs)]
        return float(root_mean_square(known))


def rectify(link: Link, z: Tensor, blur: float) -> tuple[Tensor, Tensor]:
    """Return a layer's activation of z (B, *output_shape) and its slope at z, in the shape of z.

    A ReLU is averaged over normal noise of standard deviation ``blur`` in the layer's input.
    """
    if blur and link.activation.is_relu:
        width = per_channel((blur * link.gain).clamp_min(1e-12), z)
        return relu_parts(z, width)[:2]
    assert link.activation.slope is not None
    outputs = link.activation.function(z)
    return outputs, link.activation.slope(outputs)


@dataclass(frozen=True)
class Hidden:
    """The ReLUs of one layer, whose masks are sought, with the layers before and behind them.

    A mask says which units of a channel are on, that is, have a positive input.

    Attributes:
        before: the layers before the layer of these ReLUs.
        link: the layer of these ReLUs.
        behind: the next layer, with its known outputs and the equations of its gradient.
        evidence: the gradients that decide about the masks. It is ``None`` if no mask is sought,
            because the layer has no bias or the next layer's equations are too few.
        known: the facts that proven masks give about the ReLUs' outputs (C, P), for P positions.
    """

    before: Sequence[Link]
    link: Link
    behind: Level
    evidence: MaskEvidence | None
    known: Known

    @classmethod
    def begin(
        cls,
        before: Sequence[Link],
        link: Link,
        behind: Level,
        proof: float = PROOF,
        is_sought: bool = True,
    ) -> "Hidden":
        """Return the ReLUs of a layer, ``link``, with the masks proven without a candidate input.

        ``before`` are the layers before it. ``behind`` is the next layer, with its known outputs
        and the equations of its gradient. ``proof`` is the tolerance of a mask's proof; see
        ``PROOF``. No mask is sought if ``is_sought`` is false: the caller sets this if the next
        layer gives too few equations for a proof.
        """
        errors = behind.input_errors.reshape(link.num_channels, -1) * link.scale[:, None]
        evidence, known = None, Known.nothing(errors)
        if is_sought and link.bias_gradient is not None:
            equations = behind.equations.of_channels(link.num_channels)
            weight = link.weight_gradient.flatten(1)
            evidence = MaskEvidence(equations, errors, link.bias_gradient, weight, proof)
            known = evidence.begin()
        return cls(before, link, behind, evidence, known)

    @property
    def num_channels(self) -> int:
        """The number of channels of the layer of ReLUs; each channel has one mask."""
        return len(self.known.values)

    @property
    def num_proven(self) -> int:
        """The number of channels whose mask, which says which ReLUs are on, is proven."""
        return int(proven_channels(self.known.mask).sum())

    @property
    def is_proven(self) -> bool:
        """Whether the masks of all channels, which say which units are on, are proven."""
        return self.num_proven == self.num_channels

    @property
    def is_settled(self) -> bool:
        """Whether no further mask, which says which units of a channel are on, can be proven."""
        return self.evidence is None or self.is_proven

    @property
    def is_doubtful(self) -> bool:
        """Whether masks of the layer of ReLUs were sought and none is proven."""
        return self.evidence is not None and not self.num_proven

    @cached_property
    def equations(self) -> MaskEquations:
        """The equations for the network's input that these ReLUs give.

        They come from the channels whose masks are proven, and from the next layer's weight
        gradient and known outputs.
        """
        own = None
        if self.evidence is not None and self.num_proven:
            # The weight gradient gives equations only for channels with proven masks. They are
            # mostly fewer than the unknown entries of the layer's input, so that only some
            # directions of the input are determined.
            errors = torch.where(self.known.mask.on, self.evidence.errors, 0.0)
            matrix, right = self.link.equations(
                errors.reshape(1, *self.link.output_shape), proven_channels(self.known.mask)
            )
            stated = Whitened.by_svd(matrix, right, NEGLIGIBLE)
            own = stated.faded(LEAST_SINGULAR) if stated.num_equations else None
        return MaskEquations.of(self.before, self.link, self.known, own, self.behind)

    def refine(self, inputs: Tensor) -> "Hidden":
        """Return these ReLUs with further masks that a candidate input (1, *shape) helps to prove.

        A mask says which units of a channel are on. The result is ``self`` if there is no new
        proof.
        """
        if self.evidence is None or self.is_proven:
            return self
        features = features_of(self.before, inputs)
        z = self.link.preactivation(features).reshape(self.known.values.shape)
        known = self.evidence.refine(self.known, z, self.link.patches(features))
        found = replace(self, known=known)
        # Only proven masks enter the equations, so that ``self`` with its cached equations stays
        # valid if there is no new proof.
        return self if found.num_proven == self.num_proven else found
