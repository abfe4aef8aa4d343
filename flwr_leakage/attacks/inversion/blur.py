"""ReLUs and max pooling averaged over noise: smooth where the originals have kinks.

A network's gradient jumps wherever a ReLU flips or a window's maximum moves to another position,
and its Jacobian knows nothing of units that are off. Averaged over Gaussian noise n of standard
deviation σ (Duchi, Bartlett and Wainwright 2012, randomized smoothing) a ReLU is

    E max(0, z + σ n) = z Φ(z/σ) + σ φ(z/σ),

with φ and Φ the normal density and distribution: convex, above max(0, z) by at most 0.4 σ, and of
positive slope up to seven σ from the kink. The maximum of two is ``b + max(0, a − b)``, which is
blurred likewise.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.relus import ReluCall, leaky_call, relu_call
from flwr_leakage.function_mode import FunctionMode

LEAST = 1e-3
"""A channel's spread at least, in units of its layer's: one whose ReLU is dead has none."""

FAR = 7.0
"""Widths from the kink beyond which nothing is blurred: what is left, 1e-11 and less, soon falls
below the normal numbers, where processors take several times as long."""

OUTSIDE = -1e4
"""Value of padding around the windows of max pooling, in place of −∞, whose differences are NaN."""

MAX_POOLS = {F.max_pool2d, torch.max_pool2d}
ADAPTIVE_MAX_POOLS = {F.adaptive_max_pool2d}


def blurred_relu(inputs: Tensor, width: Tensor) -> Tensor:
    """``E max(0, z + σ n)`` over normal n, twice differentiable in z.

    Args:
        inputs: z, of any shape.
        width: σ > 0, broadcast to z.

    Example:
        >>> blurred_relu(torch.tensor([0.0, 5.0]), torch.tensor(1.0))
        tensor([0.3989, 5.0000])
    """
    outputs: Tensor = _Relu.apply(inputs, width)[0]
    return outputs


def relu_parts(inputs: Tensor, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``E max(0, z + σ n)``, its slope Φ(z/σ) and its curvature φ(z/σ)/σ, without autograd.

    Args:
        inputs: z, of any shape.
        width: σ > 0, broadcast to z; ``None`` for the ReLU itself, whose curvature is 0.
    """
    if width is None:
        return inputs.clamp_min(0), (inputs > 0).to(inputs), torch.zeros_like(inputs)
    scaled = inputs / width
    far = scaled.abs() > FAR
    slope = torch.where(far, (scaled > 0).to(inputs), torch.special.ndtr(scaled))
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    density = torch.where(far, 0.0, density)
    return inputs * slope + width * density, slope, density / width


def blurred_maximum(left: Tensor, right: Tensor, width: Tensor) -> Tensor:
    """``b + E max(0, a − b + σ n) − σ/√(2π)``, which leaves equal values as they are.

    Args:
        left: a.
        right: b, of the same shape.
        width: σ > 0, broadcast.
    """
    return right + blurred_relu(left - right, width) - width / math.sqrt(2 * math.pi)


def blurred_largest(values: Sequence[Tensor], widths: Sequence[Tensor]) -> Tensor:
    """The blurred maximum of several, by pairs, of which each has the root mean square width.

    Args:
        values: of one shape.
        widths: σ > 0 of each, broadcast.
    """
    values, widths = list(values), list(widths)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], widths[::2], widths[1::2], strict=False)
        merged = [
            (a, b, v if v is w else torch.lerp(v**2, w**2, 0.5).sqrt()) for a, b, v, w in pairs
        ]
        odd = len(values) // 2 * 2
        values = [blurred_maximum(a, b, w) for a, b, w in merged] + values[odd:]
        widths = [w for _, _, w in merged] + widths[odd:]
    return values[0]


def windows_of(
    inputs: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    outside: float = OUTSIDE,
) -> list[Tensor]:
    """One map (B, C, h, w) for each position of a pooling's window; arguments as ``max_pool2d``.

    What lies outside of the inputs has the value ``outside``.
    """
    kernel, step, pad, spread = (
        _pair(value) for value in (kernel_size, stride or kernel_size, padding, dilation)
    )
    out, right = [], []
    for axis in (0, 1):
        size = inputs.shape[axis - 2] + 2 * pad[axis] - spread[axis] * (kernel[axis] - 1) - 1
        count = (math.ceil if ceil_mode else math.floor)(size / step[axis]) + 1
        # A window that starts in the padding on the right is left out.
        if ceil_mode and (count - 1) * step[axis] >= inputs.shape[axis - 2] + pad[axis]:
            count -= 1
        needed = (count - 1) * step[axis] + spread[axis] * (kernel[axis] - 1) + 1
        out.append(count)
        right.append(max(0, needed - inputs.shape[axis - 2] - pad[axis]))
    if any(pad) or any(right):
        inputs = F.pad(inputs, (pad[1], right[1], pad[0], right[0]), value=outside)
    maps = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * spread[0], j * spread[1]
            bottom, end = top + (out[0] - 1) * step[0] + 1, left + (out[1] - 1) * step[1] + 1
            maps.append(inputs[..., top : bottom : step[0], left : end : step[1]])
    return maps


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[-1])


def _tournament(inputs: Tensor, width: Tensor, *window: Any, **settings: Any) -> Tensor:
    """The blurred maximum of every window; see :func:`blurred_largest`.

    Args:
        inputs: of the pooling.
        width: σ > 0, broadcast to them.
        window: further arguments of :func:`windows_of`.
        settings: likewise.
    """
    maps = windows_of(inputs, *window, **settings)
    widths = [width] * len(maps)
    if width.ndim == inputs.ndim and width.shape[-2:].numel() > 1:
        widths = windows_of(width.expand_as(inputs), *window, **settings, outside=0.0)
        widths = [each.clamp_min(float(width.min())) for each in widths]
    return blurred_largest(maps, widths)


class Blurred(FunctionMode):
    """Within this context every ReLU and every max pooling over images is blurred.

    They are caught as functions, however a model spells them
    (:func:`flwr_leakage.attacks.relus.relu_call`), leaky ReLUs of any slope, too. Layers are told
    apart by the order of their calls in a forward pass, and a replay of several steps passes them
    again and again.

    Args:
        deviations: of the inputs of each call of a forward pass, from :func:`measure`; each is
            broadcast to that call's input.
        amount: β, noise in units of these deviations; at 0 nothing is replaced.
    """

    def __init__(self, deviations: Sequence[Tensor], amount: float) -> None:
        super().__init__()
        self.widths = [amount * deviation for deviation in deviations] if amount > 0 else []
        self.calls = 0

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replace what has kinks, leave all else."""
        if not self.widths:
            return function(*args, **kwargs)
        if _is_pooling(function, args, kwargs):
            return self._pool(function, *args, **kwargs)
        call = _relu(function, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        outputs = blurred_relu(call.inputs.clone(), self._width(call.inputs))
        if isinstance(call.slope, Tensor) or call.slope:
            outputs = call.slope * call.inputs + (1 - call.slope) * outputs
        return call.answer(outputs)

    def _width(self, inputs: Tensor) -> Tensor:
        width = self.widths[self.calls % len(self.widths)].to(inputs.dtype)
        self.calls += 1
        return width

    def _pool(
        self, function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        width = self._width(input)
        if function in MAX_POOLS:
            kwargs.pop("return_indices", None)
            return _tournament(input, width, *args, **kwargs)
        window = adaptive_window(input.shape, args[0] if args else kwargs["output_size"])
        assert window is not None  # _is_pooling
        return _tournament(input, width, window)


class _Recorder(FunctionMode):
    """Notes the inputs of every call that :class:`Blurred` would replace."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _relu(function, args, kwargs)
        if call is not None:
            self.inputs.append(call.inputs.detach().clone())
        elif _is_pooling(function, args, kwargs):
            inputs = args[0] if args else kwargs["input"]
            self.inputs.append(inputs.detach().clone())
        return function(*args, **kwargs)


def measure(forward: Callable[[], object]) -> list[Tensor]:
    """Standard deviations of the inputs of every ReLU and max pooling in one forward pass.

    Args:
        forward: passes a batch of several inputs through a network.

    Returns:
        For each call, in their order, one number a channel (1, C, 1, …), over the batch and
        positions; a plain number for inputs without positions.
    """
    return [_deviation(inputs) for inputs in kink_inputs(forward)]


def kink_inputs(forward: Callable[[], object]) -> list[Tensor]:
    """The inputs of every ReLU and max pooling in one forward pass, in the order of their calls."""
    with torch.no_grad(), _Recorder() as recorder:
        forward()
    return recorder.inputs


def _relu(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ReluCall | None:
    """The ReLU, or leaky one, that a call computes."""
    return leaky_call(function, args, kwargs) or relu_call(function, args, kwargs)


def _is_pooling(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call is a max pooling that can be blurred."""
    if function in MAX_POOLS:
        asks_indices = args[6] if len(args) > 6 else kwargs.get("return_indices", False)
        return not asks_indices
    if function in ADAPTIVE_MAX_POOLS:
        if kwargs.get("return_indices", False) or len(args) > 2:
            return False
        inputs = args[0] if args else kwargs["input"]
        size = args[1] if len(args) > 1 else kwargs["output_size"]
        return adaptive_window(inputs.shape, size) is not None
    return False


def adaptive_window(shape: Sequence[int], output_size: Any) -> tuple[int, int] | None:
    """The windows of adaptive pooling of inputs of a shape (…, H, W), where they are all alike."""
    wanted = (output_size, output_size) if isinstance(output_size, int) else output_size
    sizes = [
        (have, have if want is None else want)
        for have, want in zip(shape[-2:], wanted, strict=True)
    ]
    if any(have % want for have, want in sizes):
        return None
    return (sizes[0][0] // sizes[0][1], sizes[1][0] // sizes[1][1])


def _deviation(inputs: Tensor) -> Tensor:
    """… of a channel, and at least ``LEAST`` of the layer's: no blur has no width to divide by."""
    if inputs.ndim <= 2:
        found = inputs.var(dim=0).mean().sqrt()
    else:
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        found = inputs.std(dim=axes, keepdim=True)
    layer = found.square().mean().sqrt()
    return found.clamp_min(LEAST * layer) if bool(layer > 0) else torch.ones_like(found)


class _Relu(torch.autograd.Function):
    """Value, Φ(z/σ) and φ(z/σ)/σ; by autograd alone a product with J would take twice the time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return relu_parts(inputs, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])

    @staticmethod
    def backward(ctx: Any, errors: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return _Sloped.apply(errors, *ctx.saved_tensors), None


class _Sloped(torch.autograd.Function):
    """``e · Φ(z/σ)``, whose derivative by z is ``e φ(z/σ)/σ``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(errors: Tensor, inputs: Tensor, slope: Tensor, curvature: Tensor) -> Tensor:
        return errors * slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        errors, _, slope, curvature = inputs
        ctx.save_for_backward(errors, slope, curvature)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        errors, slope, curvature = ctx.saved_tensors
        return outer * slope, outer * (errors * curvature), None, None
