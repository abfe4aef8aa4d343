"""A network as a chain of layers, for attacks that walk it backwards."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.geometry import Geometry
from flwr_leakage.attacks.exact.weight_equations import weight_equations


@dataclass(frozen=True)
class Activation:
    """An elementwise function φ, with what its output a = φ(z) tells about its input z.

    Attributes:
        function: φ.
        slope: φ'(z) as a function of a.
        inverse: z as a function of a; valid where ``invertible`` is true.
        invertible: where a determines z. Elsewhere, as for a ReLU's zeros, a tells only z ≤ 0.
        low: infimum of the outputs.
        high: supremum of the outputs.
    """

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    invertible: Callable[[Tensor], Tensor]
    low: float
    high: float

    @property
    def has_kink(self) -> bool:
        """Whether it is a ReLU, whose zero outputs give no more than the bound z ≤ 0."""
        return self.low == 0 and math.isinf(self.high)


def _everywhere(outputs: Tensor) -> Tensor:
    return torch.ones_like(outputs, dtype=torch.bool)


IDENTITY = Activation(lambda z: z, torch.ones_like, lambda a: a, _everywhere, -math.inf, math.inf)
"""The activation of the last layer, whose outputs are the logits."""


RELU = Activation(
    torch.relu, lambda a: (a > 0).to(a.dtype), lambda a: a, lambda a: a > 0, 0.0, math.inf
)

SIGMOID = Activation(
    torch.sigmoid, lambda a: a * (1 - a), lambda a: a.logit(1e-12), _everywhere, 0.0, 1.0
)

TANH = Activation(
    torch.tanh,
    lambda a: 1 - a.square(),
    lambda a: a.clamp(-1 + 1e-12, 1 - 1e-12).atanh(),
    _everywhere,
    -1.0,
    1.0,
)


def leaky_relu(tilt: float) -> Activation:
    """``max(z, 0) + tilt · min(z, 0)`` with a tilt > 0."""
    return Activation(
        lambda z: F.leaky_relu(z, tilt),
        lambda a: torch.where(a > 0, 1.0, tilt).to(a.dtype),
        lambda a: torch.where(a > 0, a, a / tilt),
        _everywhere,
        -math.inf,
        math.inf,
    )


@dataclass(frozen=True)
class Link:
    """One layer of a chain: φ(z) with z = scale · (W ∗ a + b) + shift, for an input a.

    Attributes:
        name: the prefix of its parameters' names.
        geometry: kernel, padding and stride of a convolution; ``None`` for a linear layer.
        input_shape: shape of a for one sample, without the batch.
        output_shape: shape of z for one sample, without the batch.
        weight: W.
        bias: b; zero where the layer has none.
        scale: one factor a channel, from a BatchNorm with fixed statistics; one without BatchNorm.
        shift: one number a channel, likewise; zero without BatchNorm.
        activation: φ; the identity for the last layer.
        weight_gradient: ∂L/∂W, observed for the sample that is sought.
        bias_gradient: ∂L/∂b of that sample. Where only BatchNorm has a bias, it is computed from
            that one's gradient. ``None`` where neither has one.
    """

    name: str
    geometry: Geometry | None
    input_shape: torch.Size
    output_shape: torch.Size
    weight: Tensor
    bias: Tensor
    scale: Tensor
    shift: Tensor
    activation: Activation
    weight_gradient: Tensor
    bias_gradient: Tensor | None

    @property
    def num_channels(self) -> int:
        """Channels of the outputs; for a linear layer its units."""
        return len(self.scale)

    @property
    def gain(self) -> Tensor:
        """Standard deviation of z per channel o under inputs of unit variance: |scale_o| ‖W_o‖."""
        return self.scale.abs() * self.weight.flatten(1).norm(dim=1)

    def linear(self, inputs: Tensor) -> Tensor:
        """``W ∗ a`` of inputs (B, *input_shape)."""
        if self.geometry is None:
            return inputs.flatten(1) @ self.weight.T
        _, dilation, padding, stride = self.geometry
        return F.conv2d(inputs, self.weight, None, stride, padding, dilation)

    def scaled(self, inputs: Tensor) -> Tensor:
        """``scale · (W ∗ a)``: the change of the preactivations that a change a of inputs makes."""
        outputs = self.linear(inputs)
        return per_channel(self.scale, outputs) * outputs

    def preactivation(self, inputs: Tensor) -> Tensor:
        """Preactivations z of inputs (B, *input_shape)."""
        outputs = self.linear(inputs)
        scale, shift, bias = (
            per_channel(values, outputs) for values in (self.scale, self.shift, self.bias)
        )
        return scale * (outputs + bias) + shift

    def outputs(self, inputs: Tensor) -> Tensor:
        """φ(z) of inputs (B, *input_shape)."""
        return self.activation.function(self.preactivation(inputs))

    def patches(self, inputs: Tensor) -> Tensor:
        """The entries of an input (1, *input_shape) that each output position sees.

        Returns:
            (K, P): a channel's K weights meet these entries at P positions. Times the channel's
            errors ``∂L/∂(W ∗ a)`` (P,) they give its ``∂L/∂W`` (K,).
        """
        if self.geometry is None:
            return inputs.reshape(-1, 1)
        return self.geometry.patches(inputs)[0]

    def pull_back(self, errors: Tensor) -> Tensor:
        """∂L/∂a (B, *input_shape) from ∂L/∂(W ∗ a) (B, *output_shape)."""
        zeros = torch.zeros(len(errors), *self.input_shape, dtype=errors.dtype)
        pull = torch.func.vjp(self.linear, zeros)[1]
        return pull(errors)[0]

    def equations(self, errors: Tensor, channels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The equations that the weight gradient states; see :func:`weight_equations`.

        Args:
            errors: ∂L/∂(W ∗ a), (1, *output_shape).
            channels: which output channels to use (C,), as a mask: those whose errors are exact.
                All of them if ``None``.
        """
        gradient = self.weight_gradient
        if channels is not None:
            errors, gradient = errors[:, channels], gradient[channels]
        return weight_equations(errors, gradient, self.input_shape, self.geometry)

    def single(self) -> "Link":
        """The same layer with W and scale in single precision, as ``scaled`` needs them."""
        return replace(self, weight=self.weight.float(), scale=self.scale.float())


def per_channel(values: Tensor, outputs: Tensor) -> Tensor:
    """Reshape one value a channel (C,), so that it broadcasts over outputs (B, C, …)."""
    return values.reshape((-1,) + (1,) * (outputs.ndim - 2))


def features_of(links: Iterable[Link], inputs: Tensor) -> Tensor:
    """The outputs of the last of some successive layers, for inputs (B, *shape) of the first."""
    for link in links:
        inputs = link.outputs(inputs)
    return inputs
