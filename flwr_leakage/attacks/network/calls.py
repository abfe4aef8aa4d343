"""Recognise the layer, pooling or BatchNorm that a single call of a torch function computes.

:func:`read_call` alone knows by which functions torch computes a layer. To add a pooling, write a
function of the call's arguments that returns its :class:`Pool`, or ``None``, and decorate it with
:func:`reads`. A new activation is one entry of :mod:`flwr_leakage.attacks.network.activations`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.network.activations import READERS, Elementwise, reads

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """The settings of a two-dimensional convolution, each as a pair for rows and columns.

    Attributes:
        kernel_size: number of entries of the input, per row and column, that one output uses.
        dilation: distance between neighbouring entries that one output uses.
        padding: number of zeros on each side of the input.
        stride: distance between the first entries that two neighbouring outputs use.
    """

    kernel_size: Pair
    dilation: Pair = (1, 1)
    padding: Pair = (0, 0)
    stride: Pair = (1, 1)

    @classmethod
    def of(
        cls,
        kernel_size: int | Iterable[int],
        dilation: int | Iterable[int],
        padding: int | Iterable[int],
        stride: int | Iterable[int],
    ) -> "Geometry":
        """Return the geometry of settings that are each (rows, columns), or a number for both."""
        return cls(pair(kernel_size), pair(dilation), pair(padding), pair(stride))

    def patches(self, inputs: Tensor) -> Tensor:
        """Return the patches (B, C·K, P) of inputs (B, C, H, W) at P output positions.

        Each patch holds the C·K entries of the input that one output uses, for a kernel of K
        positions.
        """
        return F.unfold(inputs, *self)


def pair(value: int | Iterable[int]) -> Pair:
    """Return a setting of a convolution as (rows, columns); a single number holds for both."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def numeric_padding(
    padding: str | int | Iterable[int], kernel_size: Iterable[int], dilation: int | Iterable[int]
) -> Pair:
    """Return how many rows and columns of zeros a convolution's padding adds on each side.

    ``padding`` is these numbers, one number for both, ``"same"`` or ``"valid"``. ``dilation`` is
    the distance between neighbouring entries that one output uses.

    Raises:
        ValueError: ``"same"`` needs more zeros on one side than on the other.

    Example:
        >>> numeric_padding("same", (3, 5), 1), numeric_padding("valid", (3, 5), 1)
        ((1, 2), (0, 0))
    """
    if padding == "valid":
        return (0, 0)
    if padding != "same":
        assert not isinstance(padding, str)
        return pair(padding)
    totals = [d * (k - 1) for k, d in zip(kernel_size, pair(dilation), strict=True)]
    if any(total % 2 for total in totals):
        raise ValueError("padding='same' must add as many zeros on both sides: an odd kernel.")
    return totals[0] // 2, totals[1] // 2


def zeros_around(
    input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Pair | None:
    """Return the rows and columns of zeros that a call of ``F.pad`` adds on each side of maps.

    The result is ``None`` if the call pads another value, or not equally on opposite sides. The
    arguments are those of ``F.pad``.
    """
    sides = tuple(pad)
    if mode != "constant" or value or len(sides) != 4 or min(sides) < 0:
        return None
    left, right, top, bottom = sides
    return (top, left) if left == right and top == bottom else None


@dataclass(frozen=True)
class Affine:
    """One call of a linear layer ``z = W a + b`` or of a convolution ``z = W ∗ a + b``.

    Attributes:
        inputs: a, (B, n) or (B, C, H, W), without zeros that ``F.pad`` put around it.
        weight: W, (m, n) or (m, C, k, k).
        bias: b (m,), or ``None``.
        settings: stride, padding, dilation and groups; ``None`` for a linear layer.
        zeros: rows and columns of zeros that ``F.pad`` put on each side of a.
        name: the name of the parameter W; empty if W is no parameter.
        bias_name: the name of the parameter b; ``None`` if b is no parameter.
        product: the outputs ``W a`` of an earlier call, if this call only adds b to these outputs;
            else ``None``.
    """

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None = None
    settings: tuple[Any, Any, Any, int] | None = None
    zeros: Pair = (0, 0)
    name: str = ""
    bias_name: str | None = None
    product: Tensor | None = None

    @property
    def is_convolution(self) -> bool:
        """Whether the call is a convolution, and not a linear layer."""
        return self.settings is not None

    def is_layer(self, weight: str) -> bool:
        """Return whether the call is that of the linear layer with this parameter as weight."""
        return self.name == weight and not self.is_convolution

    @property
    def layer(self) -> str:
        """The name of the layer, for messages: that of its weight without ``.weight``."""
        return self.name.removesuffix(".weight")

    @property
    def is_named(self) -> bool:
        """Whether the layer's weight and bias are parameters, and not computed from others."""
        return bool(self.name) and (self.bias is None or self.bias_name is not None)

    @property
    def geometry(self) -> Geometry | None:
        """The convolution's kernel size, dilation, padding and stride; ``None`` for a linear layer.

        Raises:
            ValueError: the convolution has several groups, or more zeros on one side than on the
                other.
        """
        if self.settings is None:
            return None
        stride, padding, dilation, groups = self.settings
        if groups != 1:
            raise ValueError(f"{self.name!r} must have one group, got {groups}.")
        height, width = numeric_padding(padding, self.weight.shape[2:], dilation)
        padding = (height + self.zeros[0], width + self.zeros[1])
        return Geometry.of(self.weight.shape[2:], dilation, padding, stride)


def largest(windows: Tensor) -> Tensor:
    """Return the largest values (…) along the first axis of values (k, …)."""
    return windows.amax(0)


def mean(windows: Tensor) -> Tensor:
    """Return the means (…) along the first axis of values (k, …)."""
    return windows.mean(0)


@dataclass(frozen=True)
class Pool:
    """One call of a pooling, which computes one value from each window of maps (B, C, H, W).

    Attributes:
        inputs: the maps.
        reduce: map from the values (k, …) at the k positions of a window to the pooled values (…).
        window: rows and columns of a window.
        stride: rows and columns from one window to the next.
        padding: rows and columns of padding on each side of the maps.
        dilation: distance between neighbouring entries of a window.
        ceil_mode: whether a window may end beyond the maps.
    """

    inputs: Tensor
    reduce: Callable[[Tensor], Tensor]
    window: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    ceil_mode: bool = False

    @property
    def is_largest(self) -> bool:
        """Whether the pooling takes the largest value of each window."""
        return self.reduce is largest

    @property
    def is_plain(self) -> bool:
        """Whether the pooling's windows lie side by side, without overlap, gaps or padding."""
        plain = self.padding == (0, 0) and self.dilation == (1, 1) and not self.ceil_mode
        return plain and self.stride == self.window

    def maps(self, values: Tensor, outside: float) -> list[Tensor]:
        """Return one map (B, C, h, w) for each position in a window, row by row.

        Entry (i, j) of a map is the value at the map's position in window (i, j), of h × w windows.
        ``values`` (B, C, H, W) have the shape of the pooling's inputs. Positions beyond the inputs
        get the value ``outside``.
        """
        out, right = [], []
        for axis in (0, 1):
            length = values.shape[axis - 2]
            span = self.dilation[axis] * (self.window[axis] - 1) + 1
            size = length + 2 * self.padding[axis] - span
            count = (math.ceil if self.ceil_mode else math.floor)(size / self.stride[axis]) + 1
            # torch leaves out a window that starts in the padding on the right, so that it is not
            # counted.
            last = (count - 1) * self.stride[axis]
            if self.ceil_mode and last >= length + self.padding[axis]:
                count -= 1
            needed = (count - 1) * self.stride[axis] + span
            out.append(count)
            right.append(max(0, needed - length - self.padding[axis]))
        if any(self.padding) or any(right):
            top, left = self.padding
            values = F.pad(values, (left, right[1], top, right[0]), value=outside)
        maps = []
        for i in range(self.window[0]):
            for j in range(self.window[1]):
                top, left = i * self.dilation[0], j * self.dilation[1]
                bottom = top + (out[0] - 1) * self.stride[0] + 1
                end = left + (out[1] - 1) * self.stride[1] + 1
                maps.append(values[..., top : bottom : self.stride[0], left : end : self.stride[1]])
        return maps


@dataclass(frozen=True)
class Normalise:
    """One call of a BatchNorm ``z = γ (a − μ) / √(v + ε) + β``.

    Attributes:
        inputs: a (B, C, …).
        mean: the mean μ (C,) if statistics are given, ``None`` if the batch's own are used.
        variance: the variance v (C,) if statistics are given, ``None`` if the batch's own are used.
        weight: γ (C,), or ``None``.
        bias: β (C,), or ``None``.
        eps: ε.
        name: the name of the parameter γ; empty if γ is no parameter.
        bias_name: the name of the parameter β; empty if β is no parameter.
    """

    inputs: Tensor
    mean: Tensor | None
    variance: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    name: str = ""
    bias_name: str = ""


@dataclass(frozen=True)
class Lookup:
    """A call that looks up rows of a table of embeddings.

    Attributes:
        inputs: the indices of the rows that are looked up, such as token ids.
        name: the name of the table, which is a parameter.
    """

    inputs: Tensor
    name: str


@dataclass(frozen=True)
class Other:
    """One call of a function that is not recognised, with a copy of its first input."""

    inputs: Tensor


Op = Affine | Elementwise | Pool | Normalise | Lookup | Other
"""The kinds of operations that a recorded call in a forward pass computes."""


def read_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Op | None:
    """Return the operation that a call of a torch function computes, or ``None`` if it is unknown.

    Linear layers that are written as a product with a transposed weight take several calls, and are
    not recognised here; see :class:`flwr_leakage.attacks.network.trace.Trace`.
    """
    read = READERS.get(function)
    return None if read is None else read(*args, **kwargs)


@reads(F.linear)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Affine:
    return Affine(input, weight, bias)


@reads(F.conv2d)
def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Affine | None:
    if input.ndim != 4:
        return None
    return Affine(input, weight, bias, (stride, padding, dilation, groups))


@reads(F.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Normalise:
    mean, variance = (None, None) if training else (running_mean, running_var)
    return Normalise(input, mean, variance, weight, bias, eps)


@reads(F.max_pool2d, torch.max_pool2d)
def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Pool | None:
    if return_indices:
        return None
    window, step = pair(kernel_size), pair(stride or kernel_size)
    return Pool(input, largest, window, step, pair(padding), pair(dilation), ceil_mode)


@reads(F.avg_pool2d)
def _avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Pool | None:
    window, step, zeros = pair(kernel_size), pair(stride or kernel_size), pair(padding)
    # The mean of a window that reaches beyond the maps has another divisor than the window's size.
    # Such a pooling is not recognised.
    if divisor_override is not None or ceil_mode or any(zeros):
        return None
    return Pool(input, mean, window, step)


@reads(F.lp_pool2d)
def _lp_pool2d(
    input: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
) -> Pool | None:
    if ceil_mode or norm_type % 1:
        return None

    def norm(windows: Tensor) -> Tensor:
        sums = windows.pow(norm_type).sum(0)
        return sums.sign() * sums.abs().pow(1 / norm_type)

    return Pool(input, norm, pair(kernel_size), pair(stride or kernel_size))


@reads(F.adaptive_max_pool2d)
def _adaptive_max_pool2d(
    input: Tensor, output_size: Any, return_indices: bool = False
) -> Pool | None:
    return None if return_indices else _adaptive(input, output_size, largest)


@reads(F.adaptive_avg_pool2d)
def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Pool | None:
    return _adaptive(input, output_size, mean)


def _adaptive(inputs: Tensor, output_size: Any, reduce: Callable[[Tensor], Tensor]) -> Pool | None:
    """Return the pooling of maps (B, C, H, W) that a call of adaptive pooling computes, or None.

    The result is ``None`` if windows would differ in size. ``output_size`` is a number or a pair,
    in which ``None`` stands for the maps' own size. ``reduce`` maps the k values (k, …) of each
    window to its pooled value (…).
    """
    wanted: Sequence[int | None]
    wanted = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    if len(wanted) != 2:
        return None
    sizes = [
        (have, have if want is None else want)
        for have, want in zip(inputs.shape[-2:], wanted, strict=True)
    ]
    if any(have % want for have, want in sizes):
        return None
    window = (sizes[0][0] // sizes[0][1], sizes[1][0] // sizes[1][1])
    return Pool(inputs, reduce, window, window)
