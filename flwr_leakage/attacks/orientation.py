"""Products of an input with a weight, in whichever order a network keeps the weight's axes.

``F.linear`` takes weights of shape (outputs, inputs). Networks written by hand keep them as
(inputs, outputs), too, as ``x @ W + c`` has them. Attacks know the first order only: a network that
has the other is attacked as one whose parameter is the transpose, which gives the same gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.function_mode import FunctionMode

# Attributes are met by their getters.
TRANSPOSES = (
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
)  # fmt: skip
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


class _Orders(FunctionMode):
    """Note in which order every matrix among the parameters is multiplied.

    Args:
        names: of parameters, by identity.

    Attributes:
        right: names of those that an input is multiplied with as they are.
        others: names of those that are met as (outputs, inputs).
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.right: set[str] = set()
        self.others: set[str] = set()

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note products, change nothing."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        weights = [(self.names.get(id(t), "") if t.ndim == 2 else "") for t in tensors]
        if function in PRODUCTS and weights[1]:
            self.right.add(weights[1])
        elif function is torch.addmm and weights[2]:
            self.right.add(weights[2])
        elif function is torch.einsum:
            operands = einsum_operands(args)
            if operands is not None and operands[2]:
                self.right.add(self.names.get(id(operands[1]), ""))
        elif function is F.linear or function in TRANSPOSES:
            self.others.update(weights)
        return function(*args, **kwargs)


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
