"""Record the calls of torch functions in a forward pass of any network.

A :class:`Trace` recognises and records each call that computes an affine map, an activation, a
pooling, a normalisation or a look-up in a table. An :data:`Answer` may replace the outputs of a
call by other values.

``F.linear`` (which ``nn.Linear`` calls), ``torch.addmm``, ``torch.einsum``, and ``x @ W.T`` with
the bias added after it are all recognised as the same layer. So are views of a parameter (``W.T``,
``W.t()``, ``W.transpose(0, 1)``). Zeros that a model puts around maps before a convolution count
as the convolution's padding.

Networks written by hand may keep weights as (inputs, outputs), as in ``x @ W + c``. Attacks handle
the shape (outputs, inputs) only. They treat such a weight's transpose as the parameter, whose
gradient is the transpose of the weight's. :attr:`Trace.turned` names these weights.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jaxtyping
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage import dropout, forward, function_mode, gradient_map, model_copy
from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.calls import (
    Affine,
    Lookup,
    Normalise,
    Op,
    Other,
    Pair,
    read_call,
    zeros_around,
)
from flwr_leakage.function_mode import FunctionMode

# A function mode sees the access to an attribute such as W.T as a call of the attribute's getter.
_TRANSPOSES = (
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
)  # fmt: skip
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)
_LOOKUPS = (F.embedding, torch.embedding, Tensor.__getitem__)


class ReachedError(Exception):
    """An exception that ends a forward pass early, once the wanted values are computed.

    Attributes:
        values: the values that the pass has computed at the point where it ended.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values


Run = partial[Any]
"""A call of a torch function, with the arguments that the model passes. ``run()`` makes the call,
and ``run.func`` is the function."""

Answer = Callable[[Op, Run], Tensor]
"""A function that maps a recognised call to outputs; ``run()`` computes the model's own outputs.

A function that does not call ``run`` must copy its outputs into the inputs of an activation that
works in place (:meth:`~flwr_leakage.attacks.network.activations.Elementwise.answer`).
"""


@dataclass(frozen=True)
class Step:
    """One recorded call of a forward pass.

    Attributes:
        op: the operation that the call computes, with its inputs.
        outputs: the outputs of the call.
        called: a text with the function and the line of the model that calls it, if the trace was
            made with ``notes_all`` and the outputs differ from the inputs; else empty.
    """

    op: Op
    outputs: Tensor
    called: str = ""

    @property
    def inputs(self) -> Tensor:
        """The inputs of the recorded call, without its parameters."""
        return self.op.inputs


@dataclass(frozen=True)
class LinearUse:
    """One call of a linear layer ``z = W h + c`` in a forward pass.

    Attributes:
        weight: the name of the parameter W (m, n).
        bias: the name of the parameter c (m,), or ``None``.
        inputs: the inputs h (B, n) in the pass.
        outputs: the outputs z (B, m) in the pass.
    """

    weight: str
    bias: str | None
    inputs: Tensor
    outputs: Tensor

    @property
    def name(self) -> str:
        """The name of the layer, for messages: that of its weight without ``.weight``."""
        return self.weight.removesuffix(".weight")


T = TypeVar("T", bound="Trace")


class Trace(FunctionMode):
    """A context that recognises and records the torch calls in a network's forward pass.

    It recognises linear layers, convolutions, activations, poolings, BatchNorms and look-ups.

    Args:
        params: the parameters of the pass, by name.
        answer: a function that is given each recognised call, and returns the outputs with which
            the pass continues, or ends the pass by :class:`ReachedError`. By default the call's own
            outputs are kept.
        records: whether recognised calls are recorded as ``steps``. If false, no tensor is kept for
            a step.
        notes_all: whether calls that are not recognised are recorded, too, if their outputs differ
            from their first input.

    Attributes:
        steps: the recorded calls in their order. Calls that work in place do not change the tensors
            of a step.
        outputs: the result of the pass; ``None`` if ``answer`` ended the pass.
        reached: the values at which ``answer`` ended the pass, or ``None``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor] | None = None,
        answer: Answer | None = None,
        records: bool = True,
        notes_all: bool = False,
    ) -> None:
        super().__init__()
        self.names = {id(value): name for name, value in (params or {}).items()}
        self.steps: list[Step] = []
        self.outputs: Any = None
        self.reached: Tensor | None = None
        self._answer, self._records, self._notes_all = answer, records, notes_all
        self._right: set[str] = set()
        self._left: set[str] = set()
        self._transposed: dict[int, Tensor] = {}
        self._products: dict[int, Affine] = {}
        self._padded: dict[int, tuple[Tensor, Pair]] = {}
        self._kept: list[Tensor] = []  # Python may reuse the id of a tensor that is not kept

    @classmethod
    def of(
        cls: type[T],
        run: Callable[[], Any],
        params: Mapping[str, Tensor] | None = None,
        answer: Answer | None = None,
        records: bool = True,
        notes_all: bool = False,
    ) -> T:
        """Run a forward pass, and return the record of its calls.

        ``run`` makes the pass, and its result becomes ``outputs``. The other arguments are those of
        :class:`Trace`.
        """
        trace = cls(params, answer, records, notes_all)
        try:
            with trace:
                trace.outputs = run()
        except ReachedError as end:
            trace.reached = end.values
        return trace

    @property
    def linear(self) -> list[LinearUse]:
        """The recorded calls of linear layers whose weights are parameters, in their order."""
        return [
            LinearUse(op.name, op.bias_name, op.inputs, step.outputs)
            for step in self.steps
            if isinstance(op := step.op, Affine) and op.name and not op.is_convolution
        ]

    @property
    def turned(self) -> frozenset[str]:
        """The names of weights that are only used in the shape (inputs, outputs), as in x @ W."""
        return frozenset(self._right - self._left)

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a torch function's call, and record the call if it is recognised."""
        run = partial(function, *args, **kwargs)
        op = read_call(function, args, kwargs)
        if op is None and self.names:
            op = self._product(function, args, kwargs) or self._lookup(function, args, kwargs)
        elif isinstance(op, Affine):
            op = self._named(op)
        elif isinstance(op, Normalise):
            name, bias = (self.names.get(id(each), "") for each in (op.weight, op.bias))
            op = replace(op, name=name, bias_name=bias)
        if op is None:
            return self._other(run)
        if self._records and isinstance(op, Elementwise) and op.in_place:
            written, op = op.inputs, replace(op, inputs=op.inputs.clone())
            self.steps = [
                replace(step, outputs=op.inputs) if step.outputs is written else step
                for step in self.steps
            ]
        outputs: Tensor = run() if self._answer is None else self._answer(op, run)
        if isinstance(op, Affine) and op.bias is None and not op.is_convolution and op.name:
            self._products[id(outputs)] = op
            self._kept.append(outputs)
        if self._records:
            self._record(op, outputs, function)
        return outputs

    def _record(self, op: Op, outputs: Tensor, function: Callable[..., Any]) -> None:
        if isinstance(op, Affine) and op.product is not None:
            self.steps = [step for step in self.steps if step.outputs is not op.product]
        changes = self._notes_all and not same_values(op.inputs, outputs)
        self.steps.append(Step(op, outputs, describe_call(function) if changes else ""))
        self._kept.append(outputs)

    def _other(self, run: Run) -> Any:
        """Return the result of an unrecognised call, and record it if ``notes_all`` was set.

        ``run`` makes the call. A call whose outputs equal its first input is not recorded.
        """
        inputs: Any = run.args[0] if run.args else run.keywords.get("input")
        is_noted = self._notes_all and isinstance(inputs, Tensor) and id(inputs) not in self.names
        known = inputs.clone() if is_noted else None
        outputs = run()
        if self.names:
            self._follow(run, inputs, outputs)
        if known is None or not isinstance(outputs, Tensor) or id(outputs) in self._padded:
            return outputs
        if not same_values(known, outputs):
            self._record(Other(known), outputs, run.func)
        return outputs

    def _named(self, op: Affine) -> Affine:
        if id(op.inputs) in self._padded and op.is_convolution:
            inputs, zeros = self._padded[id(op.inputs)]
            op = replace(op, inputs=inputs, zeros=zeros)
        bias = self.names.get(id(op.bias)) if op.bias is not None else None
        name = self.names.get(id(op.weight), "")
        self._left |= {name} - {""}
        return replace(op, name=name, bias_name=bias)

    def _product(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Affine | None:
        """Return the linear layer that a matrix product, or the sum of product and bias, computes.

        The result is ``None`` if the call is neither, or if the second factor is no parameter.
        """
        if function is torch.einsum:
            found = einsum_operands(args)
            if found is None:
                return None
            inputs, weight, is_transposed = found
            given = self._upright(weight) if is_transposed else weight
            if given is None or id(given) not in self.names:
                return None
            return self._named(Affine(inputs, given))
        if function not in _PRODUCTS and function not in _SUMS and function is not torch.addmm:
            return None
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if function in _PRODUCTS and len(tensors) == 2:
            given = self._upright(tensors[1])
            return None if given is None else self._named(Affine(tensors[0], given))
        if function is torch.addmm and len(tensors) == 3:
            given = self._upright(tensors[2])
            if given is None or any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
                return None
            return self._named(Affine(tensors[1], given, tensors[0]))
        if function in _SUMS and len(tensors) == 2:
            for product, bias in (tensors, tensors[::-1]):
                if id(product) in self._products and id(bias) in self.names and bias.ndim == 1:
                    op = self._products.pop(id(product))
                    return self._named(replace(op, bias=bias, product=product))
        return None

    def _upright(self, factor: Tensor) -> Tensor | None:
        """Return the parameter W (outputs, inputs) if the second factor of a product is Wᵀ.

        Otherwise the result is ``None``. If the factor is itself a parameter, the trace notes that
        the pass uses this weight in the shape (inputs, outputs).
        """
        if factor.ndim == 2 and id(factor) in self.names:
            self._right.add(self.names[id(factor)])
        return self._transposed.get(id(factor))

    def _lookup(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Lookup | None:
        """Return the look-up of embeddings, rows of a parameter, that a call makes, or ``None``."""
        if function not in _LOOKUPS:
            return None
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        for table, indices in (tensors[:2], tensors[1::-1]) if len(tensors) > 1 else ():
            if id(table) in self.names and not indices.is_floating_point():
                return Lookup(indices, self.names[id(table)])
        return None

    def _follow(self, run: Run, inputs: Any, outputs: Any) -> None:
        """Note in the trace if a call transposes its first argument or puts zeros around it.

        ``run`` is the call, ``inputs`` its first argument and ``outputs`` its result. A transpose
        is noted if the argument is a parameter, and zeros if the call is ``F.pad``.
        """
        if run.func in _TRANSPOSES:
            if id(inputs) in self.names and inputs.ndim == 2 and outputs.shape == inputs.T.shape:
                self._transposed[id(outputs)] = inputs
                self._left.add(self.names[id(inputs)])
                self._kept.append(outputs)
        elif run.func is F.pad and (zeros := zeros_around(*run.args, **run.keywords)) is not None:
            self._padded[id(outputs)] = (inputs, zeros)
            self._kept.append(outputs)


def same_values(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors, flattened, have the same entries in the same order."""
    return left.numel() == right.numel() and torch.equal(left.flatten(), right.flatten())


def einsum_operands(args: Sequence[Any]) -> tuple[Tensor, Tensor, bool] | None:
    """Return the input and the weight of a linear layer that is written by ``torch.einsum``.

    ``args`` are an equation and its operands. The third result tells whether the weight has the
    shape (inputs, outputs), and not (outputs, inputs). The whole result is ``None`` for any other
    equation than ``...i,oi->...o`` and ``...i,io->...o``, in any letters.
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


_TORCH = str(Path(torch.__file__).parent)
_CHECKS = str(Path(jaxtyping.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_PASS = gradient_map.__file__
_AROUND = {each.__file__ for each in (dropout, forward, function_mode, model_copy)}


def describe_call(function: Callable[..., Any]) -> str:
    """Return a function's name with the line that calls it, such as ``max_pool2d (net.py:12)``.

    The line is the innermost one of the present stack that lies neither in PyTorch nor in this
    package. If a module of PyTorch inside of ``nn.Sequential`` makes the call, there is no such
    line, and the module's class follows the name.
    """
    name = getattr(function, "__name__", str(function)).strip("_")
    module = ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if file == _PASS:
            break
        # Frames of type checks lie between caller and callee, and are passed over. Some are
        # compiled at run time, in files named <…>.
        if file in _AROUND or file.startswith((_OWN, _CHECKS, "<")):
            continue
        if not file.startswith(_TORCH):
            return f"{name} ({Path(file).name}:{frame.f_lineno})"
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, nn.Module):
            module = type(owner).__name__
    return f"{name} (of {module})" if module else name
