"""The reader of a pass through a network, call by call, however the network is written.

A :class:`Reader` hands each call that computes an affine map, an activation, a pooling or a
normalisation to one method, which runs the call or replaces its outputs. A :class:`Trace` is the
reader that records a pass.

``F.linear`` (which ``nn.Linear`` calls), ``torch.addmm``, ``torch.einsum``, and ``x @ W.T`` with
the bias added after it are all the same layer. The reader follows views of a parameter (``W.T``,
``W.t()``, ``W.transpose(0, 1)``). Zeros that a model puts around maps before a convolution count
as the convolution's padding.

Networks written by hand may keep weights as (inputs, outputs), as in ``x @ W + c``. Attacks know
(outputs, inputs) only. They attack such a network with the transpose as its parameter, which gives
the same gradients. :func:`transposed_weights` names these weights.
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

# A function mode sees an attribute such as W.T as a call of its getter.
_TRANSPOSES = (
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
)  # fmt: skip
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)


class ReachedError(Exception):
    """A reader ends its pass with it, at the place that the reader was made for.

    Attributes:
        values: the values that the pass has computed there.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values


Run = partial[Any]
"""A call with the arguments of the model; ``func`` is the function."""


class Reader(FunctionMode):
    """A context that reads every call of a pass, and lets one method decide about its outputs.

    Args:
        names: names of the parameters, by the tensors' ``id``.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.names = names or {}
        self._transposed: dict[int, Tensor] = {}
        self._products: dict[int, Affine] = {}
        self._padded: dict[int, tuple[Tensor, Pair]] = {}
        self._kept: list[Tensor] = []  # a living tensor's id is not used again

    def on_op(self, op: Op, run: Run) -> Tensor:
        """Return the outputs of a recognised call; ``run()`` computes those of the model.

        A subclass that does not call ``run`` must copy its outputs into the inputs of an activation
        that works in place (:meth:`Elementwise.answer`).
        """
        outputs: Tensor = run()
        return outputs

    def on_other(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of any other call."""
        return function(*args, **kwargs)

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call, which ``on_op`` or ``on_other`` decides."""
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
        """Return the linear layer that a product, or its sum with a bias, computes, or None."""
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
        """Record transposed views of parameters, and zeros around maps."""
        if function in _TRANSPOSES:
            weight: Any = args[0] if args else kwargs.get("input")
            if id(weight) in self.names and weight.ndim == 2 and outputs.shape == weight.T.shape:
                self._transposed[id(outputs)] = weight
                self._kept.append(outputs)
        elif function is F.pad and (zeros := zeros_around(*args, **kwargs)) is not None:
            self._padded[id(outputs)] = (args[0] if args else kwargs["input"], zeros)
            self._kept.append(outputs)


def einsum_operands(args: Sequence[Any]) -> tuple[Tensor, Tensor, bool] | None:
    """Return input, weight, and whether the weight is (inputs, outputs), of a product by einsum.

    It returns None for any other equation than ``...i,oi->...o`` and ``...i,io->...o``, in any
    letters.
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
    """One recognised call of a pass.

    Attributes:
        op: the operation, with its inputs.
        outputs: the outputs of the call.
    """

    op: Op
    outputs: Tensor

    @property
    def inputs(self) -> Tensor:
        """The inputs of the call."""
        return self.op.inputs


class Trace(Reader):
    """The reader that records a pass.

    Attributes:
        steps: the recognised calls, in their order. Calls that work in place do not change the
            tensors of a step.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__(names)
        self.steps: list[Step] = []

    @classmethod
    def of(cls, run: Callable[[], object], params: Mapping[str, Tensor] | None = None) -> "Trace":
        """Return the record of a pass.

        Args:
            run: makes the pass.
            params: the parameters of the pass, by name.
        """
        trace = cls({id(value): name for name, value in (params or {}).items()})
        with trace:
            run()
        return trace

    @property
    def linear(self) -> list[Step]:
        """The steps that are linear layers with parameters as weights."""
        return [
            step
            for step in self.steps
            if isinstance(step.op, Affine) and step.op.name and not step.op.is_convolution
        ]

    def on_op(self, op: Op, run: Run) -> Tensor:
        """Return the outputs of a call, and record it."""
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
    """The reader that records the orientation in which a pass multiplies each weight matrix.

    Attributes:
        right: names of the weights that a product takes as (inputs, outputs).
        others: names of the weights that a pass takes as (outputs, inputs).
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.right: set[str] = set()
        self.others: set[str] = set()

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call, and record the weights of products."""
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
    """Return the names of the weights that a pass takes as (inputs, outputs) only.

    Args:
        params: the parameters of the pass, by name.
        run: makes the pass.
    """
    orders = _Orders({id(value): name for name, value in params.items()})
    with orders:
        run()
    return frozenset(orders.right - orders.others - {""})
