"""A network as a chain of layers, for attacks that walk it backwards."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.normalization import StatelessBatchNorm


@dataclass(frozen=True)
class Activation:
    """An elementwise function, as far as its output determines its input.

    Attributes:
        function: a = φ(z).
        slope: φ'(z) as a function of a.
        inverse: z as a function of a, right where ``invertible`` says so.
        invertible: where a determines z; elsewhere z ≤ 0 is all that a tells.
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
        """Whether it is a ReLU: outputs of zero tell a bound of z only."""
        return self.low == 0 and math.isinf(self.high)


def _everywhere(outputs: Tensor) -> Tensor:
    return torch.ones_like(outputs, dtype=torch.bool)


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes, or ``None`` if it is not known here."""
    infinity = float("inf")
    if isinstance(module, nn.ReLU):
        return Activation(
            torch.relu, lambda a: (a > 0).to(a.dtype), lambda a: a, lambda a: a > 0, 0.0, infinity
        )
    if isinstance(module, nn.LeakyReLU):
        tilt = module.negative_slope
        return Activation(
            lambda z: F.leaky_relu(z, tilt),
            lambda a: torch.where(a > 0, 1.0, tilt).to(a.dtype),
            lambda a: torch.where(a > 0, a, a / tilt),
            _everywhere,
            -infinity,
            infinity,
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
    """One layer of a chain: z = scale · (W ∗ a + b) + shift, then the activation.

    Attributes:
        module: the convolution or linear layer (for its geometry only).
        name: prefix of its parameters' names.
        input_shape: of one sample, without the batch.
        output_shape: of one sample, without the batch.
        weight: W.
        bias: b, zero where the layer has none.
        scale: per channel, of a BatchNorm with fixed statistics; one without.
        shift: per channel; zero without.
        activation: ``None`` for the last layer.
        bias_gradient: ∂L/∂b of this sample, also where BatchNorm's bias stands for b; ``None``
            where the layer has neither.
    """

    module: nn.Conv2d | nn.Linear
    name: str
    input_shape: torch.Size
    output_shape: torch.Size
    weight: Tensor
    bias: Tensor
    scale: Tensor
    shift: Tensor
    activation: Activation | None
    bias_gradient: Tensor | None

    def linear(self, inputs: Tensor) -> Tensor:
        """``W ∗ a`` of inputs (B, *input_shape)."""
        if isinstance(self.module, nn.Linear):
            return inputs.flatten(1) @ self.weight.T
        m = self.module
        return F.conv2d(inputs, self.weight, None, m.stride, m.padding, m.dilation)

    def preactivation(self, inputs: Tensor) -> Tensor:
        """Preactivations z of inputs (B, *input_shape)."""
        outputs = self.linear(inputs)
        per_channel = (-1,) + (1,) * (outputs.ndim - 2)
        scale, shift = self.scale.reshape(per_channel), self.shift.reshape(per_channel)
        return scale * (outputs + self.bias.reshape(per_channel)) + shift

    def patches(self, inputs: Tensor) -> Tensor:
        """What each output sees of an input (1, *input_shape): (K, P), K weights a channel.

        ``∂L/∂W`` of a channel is the patches times its errors ``∂L/∂(W ∗ a)`` at P positions.
        """
        if isinstance(self.module, nn.Linear):
            return inputs.reshape(-1, 1)
        m = self.module
        padding: tuple[int, int] = m.padding  # type: ignore[assignment]
        return F.unfold(inputs, m.kernel_size, m.dilation, padding, m.stride)[0]

    def pull_back(self, errors: Tensor) -> Tensor:
        """∂L/∂a (B, *input_shape) from ∂L/∂(W ∗ a) (B, *output_shape)."""
        zeros = torch.zeros(len(errors), *self.input_shape, dtype=errors.dtype)
        pull = torch.func.vjp(self.linear, zeros)[1]
        return pull(errors)[0]


def trace_chain(problem: Problem) -> list[Link]:
    """Read a model as a chain of convolutions or linear layers with activations between.

    BatchNorm with fixed statistics is folded; flattening is allowed anywhere.

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
    probe = torch.rand(1, *problem.spec.shape, dtype=like.dtype)
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
    if not links or not torch.equal(previous, logits) or links[-1].activation is not None:
        raise ValueError("the model must be a chain that ends in a linear layer.")
    if not isinstance(links[-1].module, nn.Linear):
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
        if links and links[-1].activation is None:
            raise ValueError(f"an activation must precede {name!r}.")
        if isinstance(module, nn.Conv2d) and (
            module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            raise ValueError(f"{name!r} must have one group and zero padding given in numbers.")
        prefix = f"{name}." if name else ""
        weight = problem.params[f"{prefix}weight"]
        zeros = weight.new_zeros(weight.shape[0])
        bias = problem.params.get(f"{prefix}bias", zeros)
        shapes = inputs.shape[1:], output.shape[1:]
        one, found = torch.ones_like(zeros), problem.gradient.get(f"{prefix}bias")
        links.append(Link(module, prefix, *shapes, weight, bias, one, zeros, None, found))
        return
    if not links or links[-1].activation is not None:
        raise ValueError(f"{name!r} ({type(module).__name__}) cannot be part of a chain.")
    last = links[-1]
    if isinstance(module, StatelessBatchNorm) and module.mode == "running":
        prefix = f"{name}." if name else ""
        merged = {**problem.gradient_map.buffers, **problem.buffers}
        mean = merged[f"{prefix}running_mean"].to(last.weight)
        std = (merged[f"{prefix}running_var"].to(last.weight) + module.eps).sqrt()
        gain = problem.params.get(f"{prefix}weight", torch.ones_like(std)) / std
        offset = problem.params.get(f"{prefix}bias", torch.zeros_like(std))
        found = last.bias_gradient
        if found is None and f"{prefix}bias" in problem.gradient:
            found = gain * problem.gradient[f"{prefix}bias"]
        links[-1] = replace(last, scale=gain, shift=offset - gain * mean, bias_gradient=found)
        return
    activation = activation_of(module)
    if activation is None:
        raise ValueError(f"{name!r} ({type(module).__name__}) cannot be part of a chain.")
    links[-1] = replace(last, activation=activation)
