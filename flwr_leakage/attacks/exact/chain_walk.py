"""One pass through a network that reads it as a chain of layers, however it is written.

Layers are told by the functions that compute them (``F.conv2d``, ``F.linear`` and products with a
transposed parameter, ``F.batch_norm``, activations), not by modules: ``F.relu`` and ``nn.ReLU``,
``view`` and ``nn.Flatten``, a module called twice or a function written by hand are the same chain.
Whether a layer follows another is told by the numbers that pass, and so is a ReLU that is computed
by several calls, such as ``(z + z.abs()) / 2``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.calls import describe_call
from flwr_leakage.attacks.exact.chain import (
    IDENTITY,
    RELU,
    SIGMOID,
    TANH,
    Activation,
    Link,
    leaky_relu,
)
from flwr_leakage.attacks.exact.geometry import (
    Geometry,
    Pair,
    numeric_padding,
    zeros_around,
)
from flwr_leakage.attacks.linear_walk import LinearUse, LinearWalk
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.relus import leaky_call, relu_call

_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
_TANHS = (torch.tanh, Tensor.tanh, F.tanh)

LARGE = 1e4
"""Times the probe, a function that is a ReLU of small numbers only, as ReLU6, is none."""


@dataclass(frozen=True)
class ChainUse(LinearUse):
    """A convolution, a BatchNorm or an activation as a pass met it.

    Attributes:
        geometry: of a convolution.
        activation: of an activation.
        statistics: running mean and variance of a BatchNorm, and its ε.
    """

    geometry: Geometry | None = None
    activation: Activation | None = None
    statistics: tuple[Tensor, Tensor, float] | None = None


class ChainWalk(LinearWalk):
    """Note all layers of a pass.

    Attributes:
        others: what else changed values since the last layer, with its place in the model.
        between: for every layer, what did so before it.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.others: list[str] = []
        self.between: dict[int, list[str]] = {}
        self._padded: dict[int, tuple[Tensor, Pair]] = {}

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note layers, leave all else."""
        before = len(self.uses)
        inputs: Any = args[0] if args else kwargs.get("input")
        changes = isinstance(inputs, Tensor) and not self._name(inputs)
        known = inputs.clone() if changes else None
        if function is F.conv2d:
            outputs = function(*args, **kwargs)
            self._convolve(outputs, *args, **kwargs)
        elif function is F.batch_norm:
            outputs = function(*args, **kwargs)
            self._normalise(outputs, *args, **kwargs)
        elif (found := _activation(function, args, kwargs)) is not None:
            activation, given = found
            outputs = function(*args, **kwargs)
            self._add(ChainUse("", None, given, outputs, activation=activation))
        else:
            outputs = super().on_call(function, args, kwargs)
        if len(self.uses) > before:
            self.between[len(self.uses) - 1] = self.others
            self.others = []
        elif function is F.pad and (zeros := zeros_around(*args, **kwargs)) is not None:
            self._padded[id(outputs)] = (inputs, zeros)
            self._kept.append(outputs)
        elif isinstance(outputs, Tensor) and known is not None and not _same(outputs, known):
            self.others.append(describe_call(function))
        return outputs

    def _add(self, use: ChainUse) -> None:
        self._kept.append(use.outputs)
        self.uses.append(use)

    def _convolve(
        self,
        outputs: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        name = self._name(weight)
        if groups != 1:
            raise ValueError(f"{name!r} must have one group, got {groups}.")
        padding = numeric_padding(padding, weight.shape[2:], dilation)
        if id(input) in self._padded:
            input, zeros = self._padded[id(input)]
            padding = (padding[0] + zeros[0], padding[1] + zeros[1])
        geometry = Geometry.of(weight.shape[2:], dilation, padding, stride)
        own = self._name(bias) if bias is not None else ""
        self._add(ChainUse(name, own or None, input, outputs, geometry=geometry))

    def _normalise(
        self,
        outputs: Tensor,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        if training or running_mean is None or running_var is None:
            raise ValueError("BatchNorm must use given statistics, got those of the batch.")
        names = [self._name(v) if v is not None else "" for v in (weight, bias)]
        statistics = (running_mean, running_var, eps)
        use = ChainUse(names[0], names[1] or None, input, outputs, statistics=statistics)
        self._add(use)


def _activation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Activation, Tensor] | None:
    """The activation that a function computes, and of what, or ``None``."""
    if (call := relu_call(function, args, kwargs)) is not None:
        return RELU, call.inputs
    if function in _SIGMOIDS or function in _TANHS:
        activation = SIGMOID if function in _SIGMOIDS else TANH
        return activation, args[0] if args else kwargs["input"]
    call = leaky_call(function, args, kwargs)
    if call is None or isinstance(call.slope, Tensor):  # which may be trained
        return None
    return leaky_relu(call.slope), call.inputs


def trace_chain(problem: Problem) -> list[Link]:
    """Read a model as a chain of convolutions or linear layers with activations between.

    BatchNorm with fixed statistics becomes ``scale`` and ``shift`` of the layer before it.
    Flattening is allowed anywhere, and log-softmax at the end.

    Raises:
        ValueError: the model is no such chain (branches, pooling, another function, BatchNorm with
            batch statistics, padding that is not with as many zeros on both sides, groups, a layer
            that is frozen or used twice); with the name of the layer that does not follow, and what
            changed values before it, by its line in the model.
    """
    like = next(iter(problem.params.values()))
    # A layer follows another if it takes in what that one put out. Random values tell them apart.
    stream = torch.Generator().manual_seed(0)
    probe = torch.rand(1, *problem.spec.shape, dtype=like.dtype, generator=stream)
    walk, logits = _walked(problem, probe)
    links: list[Link] = []
    previous, used = probe, set[str]()
    for number, use in enumerate(walk.uses):
        called = ", ".join(dict.fromkeys(walk.between.get(number, [])))
        what = repr(use.name) if use.weight else "an activation"
        if number > 0 and not _same(use.inputs, previous) and _is_relu(problem, probe, number):
            relu = ChainUse("", None, previous, use.inputs, activation=RELU)
            _extend(links, relu, "an activation", problem)
            previous = use.inputs
        if not _same(use.inputs, previous):
            raise ValueError(
                f"the model must be a chain of layers; {what} does not follow what is before it"
                + (f" (called there: {called})." if called else ".")
            )
        if use.weight and use.weight in used:
            raise ValueError(f"{what} cannot be part of a chain, as it is used twice.")
        if use.weight in problem.params and use.weight not in problem.gradient_map.trained:
            raise ValueError(f"{what} is frozen: its gradient is not in the update.")
        used.add(use.weight)
        previous = use.outputs
        _extend(links, use, what, problem)
    # Cross-entropy has the same gradient of log-probabilities as of logits.
    ends = _same(logits, previous) or _same(logits, previous.log_softmax(-1))
    if not links or not ends or links[-1].activation is not IDENTITY:
        called = ", ".join(dict.fromkeys(walk.others))
        raise ValueError(
            "the model must be a chain that ends in a linear layer"
            + (f" (called at its end: {called})." if called else ".")
        )
    if links[-1].geometry is not None:
        raise ValueError("the model's last layer must be linear.")
    return links


def _walked(problem: Problem, probe: Tensor) -> tuple[ChainWalk, Tensor]:
    walk = ChainWalk({id(value): name for name, value in problem.params.items()})
    with walk:
        return walk, problem.gradient_map.logits(problem.params, probe, problem.buffers)


def _is_relu(problem: Problem, probe: Tensor, number: int) -> bool:
    """Whether the calls before a layer compute together a ReLU of what the last one put out."""
    for factor in (1, LARGE):
        uses = _walked(problem, factor * probe)[0].uses
        if number >= len(uses):  # a mask that keeps all is no ReLU
            return False
        if not _same(uses[number].inputs, uses[number - 1].outputs.clamp_min(0)):
            return False
    return True


def _same(left: Tensor, right: Tensor) -> bool:
    return left.numel() == right.numel() and torch.equal(left.flatten(), right.flatten())


def _extend(links: list[Link], use: LinearUse, what: str, problem: Problem) -> None:
    """Append a layer, or fold BatchNorm or an activation into the last one."""
    folds = isinstance(use, ChainUse) and (use.activation or use.statistics) is not None
    if not folds:
        if links and links[-1].activation is IDENTITY:
            raise ValueError(f"an activation must precede {what}.")
        links.append(_link(use, what, problem))
        return
    assert isinstance(use, ChainUse)
    if not links or links[-1].activation is not IDENTITY:
        raise ValueError(f"{what} cannot be part of a chain: no layer is right before it.")
    last = links[-1]
    if use.activation is not None:
        links[-1] = replace(last, activation=use.activation)
        return
    assert use.statistics is not None
    mean, variance, eps = use.statistics
    mean, std = mean.to(last.weight), (variance.to(last.weight) + eps).sqrt()
    gain = problem.params.get(use.weight, torch.ones_like(std)) / std
    offset = problem.params.get(use.bias or "", torch.zeros_like(std))
    scale, shift = gain * last.scale, gain * (last.shift - mean) + offset
    found = last.bias_gradient
    if found is None and use.bias in problem.gradient:
        found = scale * problem.gradient[use.bias]
    links[-1] = replace(last, scale=scale, shift=shift, bias_gradient=found)


def _link(use: LinearUse, what: str, problem: Problem) -> Link:
    """A layer without BatchNorm and activation, with the observed gradients of its parameters."""
    if use.weight not in problem.gradient:
        raise ValueError("a layer's weight must be a parameter of the model as it is.")
    geometry = use.geometry if isinstance(use, ChainUse) else None
    weight = problem.params[use.weight]
    if geometry is None and use.inputs.numel() != weight.shape[1]:
        raise ValueError(f"{what} must take one vector of a sample, got several.")
    zeros = weight.new_zeros(weight.shape[0])
    return Link(
        name=use.weight.removesuffix("weight"),
        geometry=geometry,
        input_shape=use.inputs.shape[1:],
        output_shape=use.outputs.shape[1:],
        weight=weight,
        bias=problem.params.get(use.bias or "", zeros),
        scale=torch.ones_like(zeros),
        shift=zeros,
        activation=IDENTITY,
        weight_gradient=problem.gradient[use.weight],
        bias_gradient=problem.gradient.get(use.bias or ""),
    )
