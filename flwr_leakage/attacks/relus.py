"""Which calls compute a ReLU, as a function mode meets them, however a model spells them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_PLAIN = {F.relu, torch.relu, Tensor.relu}
_CLAMPS = {
    torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, torch.clamp_min, Tensor.clamp_min,
}  # fmt: skip
_CLAMPS_IN_PLACE = {
    torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_, torch.clamp_min_, Tensor.clamp_min_,
}  # fmt: skip
_IN_PLACE = {torch.relu_, Tensor.relu_, *_CLAMPS_IN_PLACE}


@dataclass(frozen=True)
class ReluCall:
    """One call that computes ``max(0, z)``.

    Attributes:
        inputs: z, of any shape.
        in_place: whether the call writes its outputs into z.
    """

    inputs: Tensor
    in_place: bool

    def answer(self, outputs: Tensor) -> Tensor:
        """What the call returns where ``outputs`` stand for its own.

        Outputs that autograd computed from z itself must have been computed from a copy of z.
        """
        return self.inputs.copy_(outputs) if self.in_place else outputs


def relu_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ReluCall | None:
    """The ReLU that a call computes, or ``None``: ``relu``, ``clamp(min=0)``, ``threshold(0, 0)``.

    Example:
        >>> call = relu_call(torch.clamp, (torch.tensor([-1.0, 2.0]),), {"min": 0})
        >>> call.inputs, call.in_place
        (tensor([-1.,  2.]), False)
        >>> relu_call(torch.clamp, (torch.tensor([-1.0, 2.0]), 0, 1), {}) is None
        True
    """
    if function in _PLAIN or function is torch.relu_ or function is Tensor.relu_:
        in_place = function in _IN_PLACE or bool(_given(args, kwargs, 1, "inplace"))
    elif function in _CLAMPS or function in _CLAMPS_IN_PLACE:
        upper = _given(args, kwargs, 2, "max")
        if not _is_zero(_given(args, kwargs, 1, "min")) or upper is not None:
            return None
        in_place = function in _IN_PLACE
    elif function is F.threshold:
        bounds = _given(args, kwargs, 1, "threshold"), _given(args, kwargs, 2, "value")
        if not all(_is_zero(bound) for bound in bounds):
            return None
        in_place = bool(_given(args, kwargs, 3, "inplace"))
    else:
        return None
    return ReluCall(args[0] if args else kwargs["input"], in_place)


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0
