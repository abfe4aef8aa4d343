"""Average activations and max pooling over noise, so that they have no kinks.

A kink is a point at which the slope jumps. A network's gradient jumps if a ReLU flips or if the
maximum of a window moves to another position, and its Jacobian is zero for units that are off. The
blur averages a function over Gaussian noise n of standard deviation σ (Duchi, Bartlett and
Wainwright 2012, randomized smoothing). A ReLU becomes

    E max(0, z + σ n) = z Φ(z/σ) + σ φ(z/σ),

with the normal density φ and distribution Φ. It is convex, exceeds max(0, z) by at most 0.4 σ, and
has a positive slope up to seven σ from the kink. Any other activation with kinks is the sum of a
smooth function and a ReLU at each kink. The maximum of two values a and b is ``b + max(0, a − b)``.
Such activations and maxima are blurred through these ReLUs. Inputs z may have any shape, and widths
σ > 0 are broadcast to z; a width of ``None`` stands for no blur.
"""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, TypeGuard

import torch
from torch import Tensor

from flwr_leakage.attacks.network.activations import Activation, Elementwise
from flwr_leakage.attacks.network.calls import Op, Pool
from flwr_leakage.attacks.network.trace import Run, Trace


def blurred_relu(inputs: Tensor, width: Tensor) -> Tensor:
    """Return ``E max(0, z + σ n)``, the mean of a ReLU over standard normal noise n.

    The result is twice differentiable in the ``inputs`` z. The width σ > 0 is broadcast to z.

    Example:
        >>> blurred_relu(torch.tensor([0.0, 5.0]), torch.tensor(1.0))
        tensor([0.3989, 5.0000])
    """
    outputs: Tensor = _Bent.apply(inputs, width)[0]
    return outputs


def relu_parts(inputs: Tensor, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a ReLU averaged over noise, with its first two derivatives, without autograd.

    ``width`` is the standard deviation σ > 0 of the noise, broadcast to the ``inputs`` z; ``None``
    for no noise.

    Returns:
        The value ``E max(0, z + σ n)`` over standard normal noise n; the slope Φ(z/σ); and the
        curvature φ(z/σ)/σ, with the normal distribution Φ and density φ. Each has z's shape.
    """
    if width is None:
        return inputs.clamp_min(0), (inputs > 0).to(inputs), torch.zeros_like(inputs)
    scaled = inputs / width
    # Beyond seven widths the blur changes values by 1e-11 at most. Farther out, its terms would
    # soon be subnormal numbers, with which processors take several times as long.
    far = scaled.abs() > 7.0
    slope = torch.where(far, (scaled > 0).to(inputs), torch.special.ndtr(scaled))
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    density = torch.where(far, 0.0, density)
    return inputs * slope + width * density, slope, density / width


def blurred_maximum(left: Tensor, right: Tensor, width: Tensor) -> Tensor:
    """Return ``b + E max(0, a − b + σ n) − σ/√(2π)``, a smooth maximum of two values.

    a is ``left``, b is ``right``, and σ > 0 is ``width``. The mean E is over standard normal noise
    n. The final term makes the result b if a = b.
    """
    return right + blurred_relu(left - right, width) - width / math.sqrt(2 * math.pi)


def blurred_largest(values: Sequence[Tensor], widths: Sequence[Tensor]) -> Tensor:
    """Return a smooth maximum of several values of one shape, entry by entry.

    :func:`blurred_maximum` merges the values pair by pair. Each value has a width σ > 0, the
    standard deviation of the noise that blurs it. The merged value gets the root mean square of the
    widths of the pair.
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


def blurred_pool(pool: Pool, width: Tensor) -> Tensor:
    """Return the outputs of a max pooling with a smooth maximum (:func:`blurred_largest`).

    ``width``, the standard deviation σ > 0 of the noise that blurs the maximum, is broadcast to the
    pooling's inputs.
    """
    # With −∞ as the padding, differences of two padded entries would be NaN. A value far below all
    # inputs serves as well.
    maps = pool.maps(pool.inputs, -1e4)
    widths = [width] * len(maps)
    if width.ndim == pool.inputs.ndim and width.shape[-2:].numel() > 1:
        widths = pool.maps(width.expand_as(pool.inputs), 0.0)
        widths = [each.clamp_min(float(width.min())) for each in widths]
    return blurred_largest(maps, widths)


def blurred(activation: Activation, inputs: Tensor, width: Tensor) -> Tensor:
    """Return the outputs of an activation φ whose kinks are blurred; they are twice differentiable.

    At kink k, which lies at p_k, the slope of φ jumps by j_k. A blurred ReLU smooths it:
    ``φ(z) + Σ_k j_k (E max(0, z − p_k + σ n) − max(0, z − p_k))``, over standard normal noise n.
    The ``inputs`` are z, and the width σ > 0 is broadcast to z.
    """
    if activation.is_relu:
        return blurred_relu(inputs, width)
    outputs = activation.function(inputs)
    for place, jump in activation.kinks:
        moved = inputs - place
        outputs = outputs + jump * (blurred_relu(moved, width) - moved.clamp_min(0))
    return outputs


def blurred_parts(
    activation: Activation, inputs: Tensor, width: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, slopes and curvatures of a blurred activation, each of the inputs' shape.

    The activation's kinks are averaged over noise as by :func:`blurred`, without autograd. The
    width σ > 0 of the blur is broadcast to the inputs; ``None`` for no blur.
    """
    if activation.is_relu:
        return relu_parts(inputs, width)
    parts = activation.parts(inputs)
    if width is None:
        return parts
    for place, jump in activation.kinks:
        own, plain = relu_parts(inputs - place, width), relu_parts(inputs - place, None)
        value, slope, curvature = (
            part + jump * (after - before)
            for part, after, before in zip(parts, own, plain, strict=True)
        )
        parts = value, slope, curvature
    return parts


def has_kinks(op: Op) -> TypeGuard[Elementwise | Pool]:
    """Return whether a call computes a max pooling, or an activation whose slope jumps.

    The slope of a ReLU, for example, jumps at 0.
    """
    if isinstance(op, Elementwise):
        return bool(op.activation.kinks)
    return isinstance(op, Pool) and op.is_largest


def blurring(deviations: Sequence[Tensor], amount: float) -> Trace:
    """Return a context in which every max pooling, and every activation with kinks, is blurred.

    A kink is a jump of the slope, such as the ReLU's at 0. Blurring averages the function over
    noise in its inputs. The standard deviation of the noise is ``amount`` (β, 0 for none) times the
    standard deviation of the call's inputs. ``deviations`` holds one such tensor for each call with
    kinks, in the order of a forward pass (:func:`measure`); it is broadcast to the inputs. A replay
    of several local steps repeats this order once for each pass.
    """
    widths = [amount * deviation for deviation in deviations] if amount > 0 else []
    following = cycle(widths)

    def answer(op: Op, run: Run) -> Tensor:
        if not widths or not has_kinks(op):
            outputs: Tensor = run()
            return outputs
        width = next(following).to(op.inputs.dtype)
        if isinstance(op, Pool):
            return blurred_pool(op, width)
        inputs = op.inputs.clone() if op.in_place else op.inputs
        return op.answer(blurred(op.activation, inputs, width))

    return Trace(answer=answer, records=False)


def measure(forward: Callable[[], object]) -> list[Tensor]:
    """Return the standard deviations of the inputs of each call with kinks in a forward pass.

    Such a call is a max pooling, or an activation whose slope jumps. There is one tensor for each
    such call in one forward pass, which ``forward`` makes, in the order of the calls. For inputs
    (B, C, …) the tensor holds the deviation (1, C, 1, …) of each channel over the batch and
    positions. For inputs (B, n) it is a scalar, the root mean square over units of their deviations
    over the batch. Each deviation is at least 1e-3 of the root mean square deviation of its call,
    and 1 if all deviations of the call are zero.
    """
    found = []
    for inputs in kink_inputs(forward):
        if inputs.ndim <= 2:
            own = inputs.var(dim=0).mean().sqrt()
        else:
            own = inputs.std(dim=[axis for axis in range(inputs.ndim) if axis != 1], keepdim=True)
        layer = own.square().mean().sqrt()
        # The deviation of a channel whose inputs do not vary is zero, by which a blur could not
        # divide. So each deviation is raised to a least one.
        found.append(own.clamp_min(1e-3 * layer) if bool(layer > 0) else torch.ones_like(own))
    return found


def kink_inputs(forward: Callable[[], object]) -> list[Tensor]:
    """Return the inputs of every max pooling, and of every activation whose slope jumps.

    The result holds copies, in the order of the calls in one forward pass, which ``forward`` makes.
    """
    with torch.no_grad():
        steps = Trace.of(forward).steps
    return [step.inputs.detach().clone() for step in steps if has_kinks(step.op)]


class _Bent(torch.autograd.Function):
    """A ReLU averaged over noise, whose value and first two derivatives are computed at once.

    If autograd differentiated the formula instead, a product with the Jacobian of a gradient would
    take twice the time.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, width: Tensor) -> tuple[Tensor, ...]:
        return relu_parts(inputs, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])

    @staticmethod
    def backward(ctx: Any, errors: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return _Sloped.apply(errors, *ctx.saved_tensors), None


class _Sloped(torch.autograd.Function):
    """The backward pass ``e φ'(z)`` of a blurred ReLU φ, itself differentiable by e and z.

    Here e are the derivatives of the loss by the outputs φ(z). The derivative of ``e φ'(z)`` by the
    inputs z is ``e φ''(z)``.
    """

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
