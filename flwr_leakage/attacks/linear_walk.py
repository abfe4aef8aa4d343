"""One pass through a network that finds its linear layers, however they are written.

``F.linear`` (which ``nn.Linear`` calls), ``torch.addmm``, ``torch.einsum``, and ``x @ W.T`` with
the bias added after it are all the same layer. Views of a parameter (``W.T``, ``W.t()``,
``W.transpose(0, 1)``) are followed; ``x @ W`` is posed as ``x @ W'.T``
(:mod:`flwr_leakage.attacks.orientation`). What a layer takes in and whether a ReLU follows it is
told by the numbers that pass, not by names, so that dropout in eval mode, flattening, pooling and
any spelling of ReLU make no difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.orientation import PRODUCTS, TRANSPOSES, einsum_operands
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.function_mode import FunctionMode

_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)


@dataclass(frozen=True)
class LinearUse:
    """One linear layer ``z = W h + c`` as a pass met it.

    Attributes:
        weight: the name of W (m, n).
        bias: the name of c (m,), or ``None``.
        inputs: h (B, n) of the pass.
        outputs: z (B, m) of the pass.
    """

    weight: str
    bias: str | None
    inputs: Tensor
    outputs: Tensor

    @property
    def name(self) -> str:
        """What to call the layer in a message."""
        return self.weight.removesuffix(".weight")


class LinearWalk(FunctionMode):
    """Note the linear layers of a pass; put given values in the place of one layer's outputs.

    Args:
        names: of parameters, by identity.
        replaced: name of the weight whose layer's outputs are replaced.
        outputs: (B, m) by what.

    Attributes:
        uses: the layers, in their order.
        computed: calls of ``F.linear`` whose weight is no parameter as it is.
    """

    def __init__(
        self, names: Mapping[int, str], replaced: str = "", outputs: Tensor | None = None
    ) -> None:
        super().__init__()
        self.names = names
        self.replaced = replaced
        self.outputs = outputs
        self.uses: list[LinearUse] = []
        self.computed = 0
        self._transposed: dict[int, str] = {}
        self._products: dict[int, tuple[str, Tensor]] = {}
        self._kept: list[Tensor] = []  # keeps ids from being used again

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note linear layers, leave all else."""
        outputs = function(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if function is F.linear:
            bias = tensors[2] if len(tensors) > 2 else None
            self.computed += not self._name(tensors[1])
            return self._note(tensors[0], self._name(tensors[1]), bias, outputs)
        if function in TRANSPOSES and tensors and self._name(tensors[0]) and tensors[0].ndim == 2:
            if outputs.shape == tensors[0].shape[::-1]:
                self._transposed[id(outputs)] = self._name(tensors[0])
                self._kept.append(outputs)
        elif function in PRODUCTS and id(tensors[1]) in self._transposed:
            return self._multiply(tensors[0], self._transposed[id(tensors[1])], outputs)
        elif function is torch.addmm and id(tensors[2]) in self._transposed:
            name = self._transposed[id(tensors[2])]
            return self._note(tensors[1], name, tensors[0], outputs)
        elif function is torch.einsum:
            return self._einsum(args, outputs)
        elif function in _SUMS and len(tensors) == 2:
            for product, bias in (tensors, tensors[::-1]):
                if id(product) in self._products and self._name(bias) and bias.ndim == 1:
                    weight, inputs = self._products.pop(id(product))
                    self.uses = [use for use in self.uses if use.outputs is not product]
                    return self._note(inputs, weight, bias, outputs)
        return outputs

    def _name(self, value: Tensor) -> str:
        return self.names.get(id(value), "")

    def _einsum(self, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        operands = einsum_operands(args)
        if operands is None:
            return outputs
        inputs, weight, is_transposed = operands
        name = self._transposed.get(id(weight), "") if is_transposed else self._name(weight)
        return self._multiply(inputs, name, outputs) if name else outputs

    def _multiply(self, inputs: Tensor, weight: str, outputs: Tensor) -> Tensor:
        """A product whose bias may come with the next sum."""
        self._products[id(outputs)] = (weight, inputs)
        return self._note(inputs, weight, None, outputs)

    def _note(self, inputs: Tensor, weight: str, bias: Tensor | None, outputs: Tensor) -> Tensor:
        if not weight:
            return outputs
        name = self._name(bias) if bias is not None else ""
        if self.outputs is not None and weight == self.replaced:
            replacement = self.outputs.clone()
            if id(outputs) in self._products:
                self._products[id(replacement)] = self._products.pop(id(outputs))
            outputs = replacement
        self._kept.append(outputs)
        self.uses.append(LinearUse(weight, name or None, inputs, outputs))
        return outputs


def find_linear_layers(problem: Problem, inputs: Tensor) -> list[LinearUse]:
    """The linear layers that a pass of ``inputs`` meets, in their order."""
    walk = LinearWalk({id(value): name for name, value in problem.params.items()})
    with walk:
        problem.gradient_map.logits(problem.params, inputs, problem.buffers)
    return walk.uses


def told_of_computed_weights(problem: Problem) -> str:
    """What a message that misses a linear layer adds where weights are computed; else nothing."""
    walk = LinearWalk({id(value): name for name, value in problem.params.items()})
    like = next(iter(problem.params.values()))
    with torch.no_grad(), walk:
        zeros = like.new_zeros(1, *problem.spec.shape)
        problem.gradient_map.logits(problem.params, zeros, problem.buffers)
    if not walk.computed:
        return ""
    return (
        "; weights of linear layers are computed from other parameters (a parametrization, such as "
        "weight_norm), so that their own gradients are not in the update"
    )


def logits_behind(
    problem: Problem, weight: str, outputs: Tensor, inputs: Tensor | None = None
) -> Tensor:
    """Logits (B, K) where a linear layer's outputs (B, m) are put in the place of its own.

    Args:
        problem: the network.
        weight: the name of the layer's weight.
        outputs: differentiable.
        inputs: (B, C, H, W) what the network is given otherwise; zeros by default.
    """
    if inputs is None:
        inputs = outputs.new_zeros(1, *problem.spec.shape).expand(len(outputs), -1, -1, -1)
    names = {id(value): name for name, value in problem.params.items()}
    with LinearWalk(names, weight, outputs):
        return problem.gradient_map.logits(problem.params, inputs, problem.buffers)
