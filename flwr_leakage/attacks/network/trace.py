"""One pass through a network, read call by call, however the network is written.

A :class:`Reader` hands each call that computes an affine map, an activation, a pooling or a
normalisation to one method, which runs it, or puts something else in its place. A :class:`Trace`
is the reader that records a pass.

``F.linear`` (which ``nn.Linear`` calls), ``torch.addmm``, ``torch.einsum``, and ``x @ W.T`` with
the bias added after it are all the same layer. Views of a parameter (``W.T``, ``W.t()``,
``W.transpose(0, 1)``) are followed. Zeros that a model puts around maps before a convolution count
as the convolution's.

Networks written by hand also keep weights as (inputs, outputs), as ``x @ W + c`` has them. Attacks
know (outputs, inputs) only: such a network is attacked as one whose parameter is the transpose,
which gives the same gradients. :func:`transposed_weights` tells which weights these are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.calls import Affine, Normalise, Op, read_call
from flwr_leakage.attacks.network.geometry import Pair, zeros_around
from flwr_leakage.function_mode import FunctionMode

# Attributes are met by their getters.
_TRANSPOSES = (
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
)  # fmt: skip
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)

Run = partial[Any]
"""A call as the model makes it; ``func`` is the function."""


class Reader(FunctionMode):
    """A context in which every call of a pass is read, and decided by one method.

    Args:
        names: of parameters, by the tensors' ``id``.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.names = names or {}
        self._transposed: dict[int, Tensor] = {}
        self._products: dict[int, Affine] = {}
        self._padded: dict[int, tuple[Tensor, Pair]] = {}
        self._kept: list[Tensor] = []  # keeps ids from being used again

    def on_op(self, op: Op, run: Run) -> Tensor:
        """What a call that was read gives; ``run()`` computes what the model computes.

        A subclass that does not call ``run`` copies its outputs into the inputs of an activation
        that works in place (:meth:`Elementwise.answer`).
        """
        outputs: Tensor = run()
        return outputs

    def on_other(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What any other call gives."""
        return function(*args, **kwargs)

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Read a call, and hand it on."""
        run = partial(function, *args, **kwargs)
        op = read_call(function, args, kwargs)
        if op is None and self.names:
            op = self._product(function, args, kwargs)
        elif isinstance(op, Affine):
            op = self._named(op)
        elif isinstance(op, Normalise):
            name, bias = (self.names.get(id(each), "") for each in (op.weight, op.bias))
            op = replace(op, name=name, bias_name=bias)
        if op is None:
            outputs = self.on_other(function, args, kwargs)
            if self.names:
                self._follow(function, args, kwargs, outputs)
            return outputs
        outputs = self.on_op(op, run)
        if isinstance(op, Affine) and op.bias is None and not op.is_convolution and op.name:
            self._products[id(outputs)] = op
            self._kept.append(outputs)
        return outputs

    def _named(self, op: Affine) -> Affine:
        if id(op.inputs) in self._padded and op.is_convolution:
            inputs, zeros = self._padded[id(op.inputs)]
            op = replace(op, inputs=inputs, zeros=zeros)
        bias = self.names.get(id(op.bias)) if op.bias is not None else None
        return replace(op, name=self.names.get(id(op.weight), ""), bias_name=bias)

    def _product(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Affine | None:
        """The linear layer that a product, or the sum of one with a bias, computes."""
        if function is torch.einsum:
            found = einsum_operands(args)
            if found is None:
                return None
            inputs, weight, is_transposed = found
            given = self._transposed.get(id(weight)) if is_transposed else weight
            if given is None or id(given) not in self.names:
                return None
            return self._named(Affine(inputs, given))
        if function not in _PRODUCTS and function not in _SUMS and function is not torch.addmm:
            return None
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if function in _PRODUCTS and len(tensors) == 2 and id(tensors[1]) in self._transposed:
            return self._named(Affine(tensors[0], self._transposed[id(tensors[1])]))
        if function is torch.addmm and len(tensors) == 3 and id(tensors[2]) in self._transposed:
            if any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
                return None
            return self._named(Affine(tensors[1], self._transposed[id(tensors[2])], tensors[0]))
        if function in _SUMS and len(tensors) == 2:
            for product, bias in (tensors, tensors[::-1]):
                if id(product) in self._products and id(bias) in self.names and bias.ndim == 1:
                    op = self._products.pop(id(product))
                    return self._named(replace(op, bias=bias, product=product))
        return None

    def _follow(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> None:
        """Note views of parameters, and zeros around maps."""
        if function in _TRANSPOSES:
            weight: Any = args[0] if args else kwargs.get("input")
            if id(weight) in self.names and weight.ndim == 2 and outputs.shape == weight.T.shape:
                self._transposed[id(outputs)] = weight
                self._kept.append(outputs)
        elif function is F.pad and (zeros := zeros_around(*args, **kwargs)) is not None:
            self._padded[id(outputs)] = (args[0] if args else kwargs["input"], zeros)
            self._kept.append(outputs)


def einsum_operands(args: Sequence[Any]) -> tuple[Tensor, Tensor, bool] | None:
    """Input, weight, and whether the weight is (inputs, outputs), of an einsum that is a product.

    ``None`` where it is none: ``...i,oi->...o`` and ``...i,io->...o`` are, in any letters.
    """
    equation, *operands = args
    if len(operands) != 2 or not isinstance(equation, str) or "->" not in equation:
        return None
    left, _, outputs = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    shared, made = first[-1:], outputs[-1:]
    if first[:-1] != outputs[:-1] or shared == made or second not in (made + shared, shared + made):
        return None
    return operands[0], operands[1], second == shared + made


@dataclass(frozen=True)
class Step:
    """What one call of a pass computed.

    Attributes:
        op: what it computes, of which inputs.
        outputs: what it gave.
    """

    op: Op
    outputs: Tensor

    @property
    def inputs(self) -> Tensor:
        """What it took."""
        return self.op.inputs


class Trace(Reader):
    """Records a pass.

    Attributes:
        steps: what was read, in the order of the calls. Their tensors are not changed by calls
            that work in place.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__(names)
        self.steps: list[Step] = []

    @classmethod
    def of(cls, run: Callable[[], object], params: Mapping[str, Tensor] | None = None) -> "Trace":
        """The record of a pass.

        Args:
            run: makes the pass.
            params: the parameters that it takes, by name.
        """
        trace = cls({id(value): name for name, value in (params or {}).items()})
        with trace:
            run()
        return trace

    @property
    def linear(self) -> list[Step]:
        """The linear layers whose weights are parameters."""
        return [
            step
            for step in self.steps
            if isinstance(step.op, Affine) and step.op.name and not step.op.is_convolution
        ]

    def on_op(self, op: Op, run: Run) -> Tensor:
        """Record a call."""
        if isinstance(op, Elementwise) and op.in_place:
            written, op = op.inputs, replace(op, inputs=op.inputs.clone())
            self.steps = [
                replace(step, outputs=op.inputs) if step.outputs is written else step
                for step in self.steps
            ]
        if isinstance(op, Affine) and op.product is not None:
            self.steps = [step for step in self.steps if step.outputs is not op.product]
        outputs: Tensor = run()
        self.steps.append(Step(op, outputs))
        self._kept.append(outputs)
        return outputs


class _Orders(Reader):
    """Notes in which order every matrix among the parameters is multiplied.

    Attributes:
        right: names of those that an input is multiplied with as they are.
        others: names of those that are met as (outputs, inputs).
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.right: set[str] = set()
        self.others: set[str] = set()

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note products, change nothing."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        weights = [(self.names.get(id(t), "") if t.ndim == 2 else "") for t in tensors]
        if function in _PRODUCTS and weights[1]:
            self.right.add(weights[1])
        elif function is torch.addmm and weights[2]:
            self.right.add(weights[2])
        elif function is torch.einsum:
            operands = einsum_operands(args)
            if operands is not None and operands[2]:
                self.right.add(self.names.get(id(operands[1]), ""))
        elif function is F.linear or function in _TRANSPOSES:
            self.others.update(weights)
        return function(*args, **kwargs)


def transposed_weights(params: Mapping[str, Tensor], run: Callable[[], object]) -> frozenset[str]:
    """Names of the weights that a pass takes as (inputs, outputs) only.

    Args:
        params: with which it is made.
        run: makes the pass.
    """
    orders = _Orders({id(value): name for name, value in params.items()})
    with orders:
        run()
    return frozenset(orders.right - orders.others - {""})
