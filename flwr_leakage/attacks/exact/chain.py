"""A network as a chain of layers, for attacks that walk it backwards."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.exact.geometry import Geometry
from flwr_leakage.attacks.exact.weight_equations import weight_equations
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.normalization import StatelessBatchNorm


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


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes, or ``None`` for a module of another kind."""
    if isinstance(module, nn.ReLU):
        return Activation(
            torch.relu, lambda a: (a > 0).to(a.dtype), lambda a: a, lambda a: a > 0, 0.0, math.inf
        )
    if isinstance(module, nn.LeakyReLU):
        tilt = module.negative_slope
        return Activation(
            lambda z: F.leaky_relu(z, tilt),
            lambda a: torch.where(a > 0, 1.0, tilt).to(a.dtype),
            lambda a: torch.where(a > 0, a, a / tilt),
            _everywhere,
            -math.inf,
            math.inf,
        )
    if isinstance(module, nn.Sigmoid):
        return Activation(
            torch.sigmoid, lambda a: a * (1 - a), lambda a: a.logit(1e-12), _everywhere, 0.0, 1.0
        )
    if isinstance(module, nn.Tanh):
        return Activation(
            torch.tanh,
            lambda a: 1 - a.square(),
            lambda a: a.clamp(-1 + 1e-12, 1 - 1e-12).atanh(),
            _everywhere,
            -1.0,
            1.0,
        )
    return None


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


def trace_chain(problem: Problem) -> list[Link]:
    """Read a model as a chain of convolutions or linear layers with activations between.

    BatchNorm with fixed statistics becomes ``scale`` and ``shift`` of the layer before it.
    Flattening is allowed anywhere.

    Raises:
        ValueError: the model is no such chain (branches, pooling, another layer, BatchNorm with
            batch statistics, padding that is not with zeros, groups).
    """
    leaves: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    handles = []
    for name, module in problem.gradient_map.model.named_modules():
        if not list(module.children()):

            def keep(
                m: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name
            ) -> None:
                leaves.append((name, m, inputs[0], output))

            handles.append(module.register_forward_hook(keep))
    like = next(iter(problem.params.values()))
    # A layer follows another if it takes in what that one put out. Random values tell them apart.
    stream = torch.Generator().manual_seed(0)
    probe = torch.rand(1, *problem.spec.shape, dtype=like.dtype, generator=stream)
    try:
        logits = problem.gradient_map.logits(problem.params, probe, problem.buffers)
    finally:
        for handle in handles:
            handle.remove()
    links: list[Link] = []
    previous = probe
    for name, module, inputs, output in leaves:
        if inputs.numel() != previous.numel() or not torch.equal(
            inputs.flatten(), previous.flatten()
        ):
            raise ValueError(f"the model must be a chain of layers; {name!r} does not follow.")
        previous = output
        _extend(links, name, module, inputs, output, problem)
    if not links or not torch.equal(previous, logits) or links[-1].activation is not IDENTITY:
        raise ValueError("the model must be a chain that ends in a linear layer.")
    if links[-1].geometry is not None:
        raise ValueError("the model's last layer must be linear.")
    return links


def _extend(
    links: list[Link],
    name: str,
    module: nn.Module,
    inputs: Tensor,
    output: Tensor,
    problem: Problem,
) -> None:
    """Append a layer, or fold a module into the last one."""
    if isinstance(module, nn.Flatten | nn.Identity | nn.Dropout):
        return
    if isinstance(module, nn.Conv2d | nn.Linear):
        if links and links[-1].activation is IDENTITY:
            raise ValueError(f"an activation must precede {name!r}.")
        links.append(_link(name, module, inputs, output, problem))
        return
    if not links or links[-1].activation is not IDENTITY:
        raise ValueError(f"{name!r} ({type(module).__name__}) cannot be part of a chain.")
    last = links[-1]
    if isinstance(module, StatelessBatchNorm) and module.mode == "running":
        prefix = f"{name}." if name else ""
        merged = {**problem.gradient_map.buffers, **problem.buffers}
        mean = merged[f"{prefix}running_mean"].to(last.weight)
        std = (merged[f"{prefix}running_var"].to(last.weight) + module.eps).sqrt()
        gain = problem.params.get(f"{prefix}weight", torch.ones_like(std)) / std
        offset = problem.params.get(f"{prefix}bias", torch.zeros_like(std))
        scale, shift = gain * last.scale, gain * (last.shift - mean) + offset
        found = last.bias_gradient
        if found is None and f"{prefix}bias" in problem.gradient:
            found = scale * problem.gradient[f"{prefix}bias"]
        links[-1] = replace(last, scale=scale, shift=shift, bias_gradient=found)
        return
    activation = activation_of(module)
    if activation is None:
        raise ValueError(f"{name!r} ({type(module).__name__}) cannot be part of a chain.")
    links[-1] = replace(last, activation=activation)


def _link(
    name: str, module: nn.Conv2d | nn.Linear, inputs: Tensor, output: Tensor, problem: Problem
) -> Link:
    """A layer without BatchNorm and activation, with the observed gradients of its parameters."""
    geometry = None
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ValueError(f"{name!r} must have one group and zero padding given in numbers.")
        geometry = Geometry.of(module.kernel_size, module.dilation, module.padding, module.stride)
    prefix = f"{name}." if name else ""
    weight = problem.params[f"{prefix}weight"]
    zeros = weight.new_zeros(weight.shape[0])
    return Link(
        name=prefix,
        geometry=geometry,
        input_shape=inputs.shape[1:],
        output_shape=output.shape[1:],
        weight=weight,
        bias=problem.params.get(f"{prefix}bias", zeros),
        scale=torch.ones_like(zeros),
        shift=zeros,
        activation=IDENTITY,
        weight_gradient=problem.gradient[f"{prefix}weight"],
        bias_gradient=problem.gradient.get(f"{prefix}bias"),
    )
