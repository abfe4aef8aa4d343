"""The reader of calls that compute a ReLU, however a model spells them."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import functional as F

from flwr_leakage.attacks.network.activations import RELU, Elementwise, leaky_relu

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def relu_call(function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Elementwise | None:
    """Return the ReLU, leaky or not, that a call computes, or None.

    Names identify ``relu``, ``clamp(min=0)``, ``threshold(0, 0)``, and the leaky ``leaky_relu``,
    ``prelu`` and ``rrelu`` outside of training. A leaky ReLU counts as a ReLU if its slope is zero
    and is no trained parameter, whose gradient would be lost with the call. The values of the call
    identify other spellings: ``maximum``, ``max`` and ``fmax`` with a tensor of zeros, ``where``
    and ``masked_fill`` that put zeros where z is not positive, and ``z * mask`` with the mask
    ``1[z > 0]``. They may agree by chance: if all of z is positive, a boolean mask that keeps all
    counts as ``1[z > 0]``, while a mask of numbers must hold a zero. No call of
    ``(z + z.abs()) / 2`` is a ReLU by itself.

    Example:
        >>> call = relu_call(torch.clamp, (torch.tensor([-1.0, 2.0]),), {"min": 0})
        >>> call.inputs, call.in_place
        (tensor([-1.,  2.]), False)
        >>> relu_call(torch.clamp, (torch.tensor([-1.0, 2.0]), 0, 1), {}) is None
        True
    """
    read = _RELUS.get(function)
    return None if read is None else read(args, kwargs)


def _given(args: Args, kwargs: Kwargs, position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _plain(args: Args, kwargs: Kwargs, in_place: bool = False) -> Elementwise:
    in_place = in_place or bool(_given(args, kwargs, 1, "inplace"))
    return Elementwise(_given(args, kwargs, 0, "input"), RELU, in_place)


def _clamp(args: Args, kwargs: Kwargs, in_place: bool = False) -> Elementwise | None:
    inputs, least = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "min")
    if _given(args, kwargs, 2, "max") is not None or not _is_zero(least):
        return None
    return Elementwise(inputs, RELU, in_place) if _keeps_shape(inputs, least) else None


def _threshold(args: Args, kwargs: Kwargs, in_place: bool = False) -> Elementwise | None:
    bounds = _given(args, kwargs, 1, "threshold"), _given(args, kwargs, 2, "value")
    in_place = in_place or bool(_given(args, kwargs, 3, "inplace"))
    if not all(_is_zero(bound) for bound in bounds):
        return None
    return Elementwise(_given(args, kwargs, 0, "input"), RELU, in_place)


def _maximum(args: Args, kwargs: Kwargs) -> Elementwise | None:
    left, right = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other")
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return None  # the call computes the maximum of one tensor, or along an axis
    for inputs, other in ((left, right), (right, left)):
        if _keeps_shape(inputs, other) and _is_zero(other):
            return Elementwise(inputs, RELU)
    return None


def _where(args: Args, kwargs: Kwargs) -> Elementwise | None:
    condition = _given(args, kwargs, 0, "condition")
    return _chosen(condition, _given(args, kwargs, 1, "input"), _given(args, kwargs, 2, "other"))


def _where_method(args: Args, kwargs: Kwargs) -> Elementwise | None:
    condition, other = _given(args, kwargs, 1, "condition"), _given(args, kwargs, 2, "other")
    return _chosen(condition, args[0], other)


def _masked_fill(args: Args, kwargs: Kwargs) -> Elementwise | None:
    mask, value = _given(args, kwargs, 1, "mask"), _given(args, kwargs, 2, "value")
    return _chosen(mask, value, _given(args, kwargs, 0, "input"))


def _chosen(condition: Any, where: Any, elsewhere: Any) -> Elementwise | None:
    """Return the ReLU of a choice between two values by a condition, or None."""
    if not (isinstance(condition, Tensor) and condition.dtype == torch.bool):
        return None
    for inputs, other, is_kept in ((where, elsewhere, True), (elsewhere, where, False)):
        if not isinstance(inputs, Tensor) or inputs.shape != condition.shape:
            continue
        kept = condition if is_kept else ~condition
        if _keeps_shape(inputs, other) and _is_zero(other) and _is_mask(kept, inputs):
            return Elementwise(inputs, RELU)
    return None


def _product(args: Args, kwargs: Kwargs) -> Elementwise | None:
    left, right = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other")
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.shape != right.shape:
        return None
    for inputs, mask in ((left, right), (right, left)):
        # Most products are of other tensors. The first entry rules most of them out.
        if _first(mask) not in (0, 1) or not _keeps_shape(inputs, mask):
            continue
        if _is_mask(mask, inputs) and (mask.dtype == torch.bool or not _keeps_all(mask)):
            return Elementwise(inputs, RELU)
    return None


def _leaky(args: Args, kwargs: Kwargs, in_place: bool = False) -> Elementwise:
    slope = float(_given(args, kwargs, 1, "negative_slope", 0.01))
    in_place = in_place or bool(_given(args, kwargs, 2, "inplace"))
    return _tilted(_given(args, kwargs, 0, "input"), slope, in_place)


def _parametric(args: Args, kwargs: Kwargs) -> Elementwise:
    inputs, slope = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "weight")
    if slope.numel() > 1:  # one slope for each channel
        slope = slope.reshape(-1, *[1] * (inputs.ndim - 2))
    return _tilted(inputs, slope)


def _randomised(args: Args, kwargs: Kwargs, in_place: bool = False) -> Elementwise | None:
    lower = _given(args, kwargs, 1, "lower", 1 / 8)
    upper = _given(args, kwargs, 2, "upper", 1 / 3)
    if _given(args, kwargs, 3, "training", False) and lower != upper:
        return None
    in_place = in_place or bool(_given(args, kwargs, 4, "inplace"))
    return _tilted(_given(args, kwargs, 0, "input"), (lower + upper) / 2, in_place)


def _tilted(inputs: Tensor, slope: float | Tensor, in_place: bool = False) -> Elementwise:
    is_trained = isinstance(slope, Tensor) and slope.requires_grad
    activation = leaky_relu(slope) if is_trained or not _is_zero(slope) else RELU
    return Elementwise(inputs, activation, in_place)


def _keeps_shape(inputs: Tensor, other: Any) -> bool:
    """Return whether a result of both arguments has the shape and the type of the inputs."""
    if not isinstance(other, Tensor):
        return isinstance(inputs, Tensor)
    if not inputs.is_floating_point() or torch.result_type(inputs, other) != inputs.dtype:
        return False
    if other.shape == inputs.shape or other.ndim == 0:
        return True
    sizes = zip(other.shape[::-1], inputs.shape[::-1], strict=False)
    return other.ndim <= inputs.ndim and all(mine in (1, theirs) for mine, theirs in sizes)


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not bool(_numbers(value).any())
    return isinstance(value, int | float) and value == 0


def _is_mask(mask: Tensor, inputs: Tensor) -> bool:
    """Return whether a mask is ``1[z > 0]``, or ``1[z ≥ 0]`` with some zeros."""
    if not bool(_numbers(mask != (inputs > 0)).any()):
        return True
    if bool(_numbers(mask != (inputs >= 0)).any()):
        return False
    return not _keeps_all(mask)  # for outputs of a ReLU, any mask that keeps all is 1[z ≥ 0]


def _keeps_all(mask: Tensor) -> bool:
    return bool(_numbers(mask).all())


def _first(values: Tensor) -> float:
    numbers = _numbers(values)
    return float(numbers[(0,) * numbers.ndim].item()) if numbers.numel() else math.nan


def _numbers(values: Tensor) -> Tensor:
    """Return the values of a tensor without the wrappers of ``torch.func``'s transforms.

    A batched tensor of ``vmap`` has no single truth value. Its unwrapped tensor holds all samples.
    """
    while _functorch.is_functorch_wrapped_tensor(values):
        values = _functorch.get_unwrapped(values)
    return values


_Read = Callable[[Args, Kwargs], Elementwise | None]


def _table(*rows: tuple[_Read, tuple[Any, ...]]) -> dict[Callable[..., Any], _Read]:
    return {function: read for read, functions in rows for function in functions}


_RELUS = _table(
    (_plain, (F.relu, torch.relu, Tensor.relu)),
    (partial(_plain, in_place=True), (torch.relu_, Tensor.relu_)),
    (_clamp, (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)),
    (_clamp, (torch.clamp_min, Tensor.clamp_min)),
    (partial(_clamp, in_place=True), (torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_)),
    (partial(_clamp, in_place=True), (torch.clamp_min_, Tensor.clamp_min_)),
    (_threshold, (F.threshold, torch.threshold)),
    (partial(_threshold, in_place=True), (torch.threshold_,)),
    (_maximum, (torch.maximum, Tensor.maximum, torch.max, Tensor.max, torch.fmax, Tensor.fmax)),
    (_where, (torch.where,)),
    (_where_method, (Tensor.where,)),
    (_masked_fill, (torch.masked_fill, Tensor.masked_fill)),
    (_product, (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply)),
    (_leaky, (F.leaky_relu,)),
    (partial(_leaky, in_place=True), (F.leaky_relu_,)),
    (_parametric, (torch.prelu, Tensor.prelu)),
    (_randomised, (F.rrelu, torch.rrelu)),
    (partial(_randomised, in_place=True), (torch.rrelu_,)),
)
