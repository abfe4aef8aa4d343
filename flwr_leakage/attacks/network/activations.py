"""Register the activations that attacks can handle, each by one entry for all its names in torch.

To add an activation, write a function that returns its :class:`Activation`. Decorate it with
:func:`entry` and the torch functions that compute the activation. Every attack then handles it.
Attacks that solve a network layer by layer from its outputs use ``slope``, ``inverse``, ``low``,
``high`` and ``ends``. Attacks that blur a network use ``kinks``. Attacks that linearise a network
use the first two derivatives of ``function``.

A ReLU can be written in many ways, and each has an entry. Names identify ``relu``,
``clamp(min=0)``, ``threshold(0, 0)``, and outside of training the leaky ``leaky_relu``, ``prelu``
and ``rrelu``. A leaky ReLU counts as a ReLU if its slope is zero and is no trained parameter, whose
gradient would be lost with the call. The values of a call identify other ways: ``maximum``, ``max``
and ``fmax`` with a tensor of zeros, ``where`` and ``masked_fill`` that put zeros where z is not
positive, and ``z * mask`` with the mask ``1[z > 0]``. A mask may equal ``1[z > 0]`` by chance: if
all of z is positive, a boolean mask that keeps all counts as this mask, while a mask of numbers
must hold a zero. A ReLU that is written as ``(z + z.abs()) / 2`` is not recognised here, as no
single call is one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import functional as F

from flwr_leakage.forward import hard_sigmoid

Elementary = Callable[[Tensor], Tensor]

INSIDE = 1e-12
"""Least distance from an activation's asymptote to which an output is moved before it is inverted.
Rounding can carry a float64 output to the asymptote itself, whose inverse is infinite. The distance
is far above that rounding, and far below the error of 1e-9 that solved features have."""


@dataclass(frozen=True)
class Activation:
    """An elementwise function φ, with the facts that its output a = φ(z) gives about its input z.

    Attributes:
        name: the name of φ for messages.
        function: the function φ.
        slope: φ'(z) as a function of a; ``None`` if a does not determine φ'(z).
        inverse: z as a function of a, valid for ``invertible`` outputs; ``None`` if φ has none.
        low: infimum of the outputs.
        high: supremum of the outputs.
        ends: the largest input at which φ still equals ``low``, and the smallest input at which φ
            equals ``high``; infinite if φ only tends to these values.
        kinks: inputs at which φ' jumps, each with the size of the jump.
        is_relu: whether φ is ``max(0, z)``.
    """

    name: str
    function: Elementary
    slope: Elementary | None = None
    inverse: Elementary | None = None
    low: float = -math.inf
    high: float = math.inf
    ends: tuple[float, float] = (-math.inf, math.inf)
    kinks: Sequence[tuple[float, float | Tensor]] = ()
    is_relu: bool = False

    def invertible(self, outputs: Tensor) -> Tensor:
        """Return booleans, true where an output of the activation determines its input.

        Where they are false, the output is the least or the largest value of the activation, which
        many inputs give.
        """
        width = self.high - self.low
        # An output within this margin of an end of the range counts as the end; the error of solved
        # features is 1e-9, far below the margin.
        margin = 1e-6 * width if math.isfinite(width) else 0.0
        inside = torch.ones_like(outputs, dtype=torch.bool)
        if math.isfinite(self.ends[0]):
            inside = inside & (outputs > self.low + margin)
        if math.isfinite(self.ends[1]):
            inside = inside & (outputs < self.high - margin)
        return inside

    def target(self, outputs: Tensor) -> Tensor:
        """Return for each output a its input z, or the bound of its inputs if many inputs give a.

        For a ReLU and a = 0, the bound is 0, as all z ≤ 0 give a.
        """
        assert self.inverse is not None
        known = self.invertible(outputs)
        return torch.where(known, self.inverse(outputs), self._end(outputs))

    def binds(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return booleans, true where an output a determines its input, or where z does not give a.

        The inputs are z and the outputs are a, of the same shape. The booleans are false where many
        inputs give a, and z is one of them: for a ReLU, where a = 0 and z ≤ 0.
        """
        end = self._end(outputs)
        beyond = torch.where(self._is_high(outputs), inputs < end, inputs > end)
        return self.invertible(outputs) | beyond

    def _end(self, outputs: Tensor) -> Tensor:
        first, last = (end if math.isfinite(end) else 0.0 for end in self.ends)
        return torch.where(self._is_high(outputs), last, first).to(outputs.dtype)

    def _is_high(self, outputs: Tensor) -> Tensor:
        """Return booleans, true for outputs nearer to ``high`` than to ``low``.

        All are false if no input of the activation gives its supremum ``high``.
        """
        if not math.isfinite(self.ends[1]):
            return torch.zeros_like(outputs, dtype=torch.bool)
        return outputs > (self.low + self.high) / 2

    def parts(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation φ(z) at inputs z and its derivatives φ'(z) and φ''(z).

        Each has the shape of z. At a jump of a derivative, the result is the value that torch
        takes; a ReLU has φ'(0) = 0.
        """
        if self.is_relu:
            return inputs.clamp_min(0), (inputs > 0).to(inputs), torch.zeros_like(inputs)
        with torch.enable_grad():
            point = inputs.detach().requires_grad_()
            value = self.function(point)
            (slope,) = torch.autograd.grad(value.sum(), point, create_graph=True)
            curvature = torch.zeros_like(inputs)
            if slope.requires_grad:
                (curvature,) = torch.autograd.grad(slope.sum(), point)
        return value.detach(), slope.detach(), curvature


@dataclass(frozen=True)
class Elementwise:
    """One call of a torch function that computes an activation in a forward pass.

    Attributes:
        inputs: the inputs z, of any shape.
        activation: the activation φ.
        in_place: whether the call writes its outputs into the tensor of its inputs.
    """

    inputs: Tensor
    activation: Activation
    in_place: bool = False

    def answer(self, outputs: Tensor) -> Tensor:
        """Return given ``outputs`` as the result of the call, in place of the call's own outputs.

        If the call works in place, ``outputs`` are written into the tensor of the call's inputs z.
        The caller must then have computed them from a copy of z.
        """
        return self.inputs.copy_(outputs) if self.in_place else outputs


Read = Callable[..., Any]
READERS: dict[Callable[..., Any], Read] = {}
"""The registry of the layers and activations that attacks recognise. It maps a torch function to
the reader of its calls. A reader takes a call's arguments, and returns the operation that the call
computes, or ``None`` if that is of no known kind."""


def reads(*functions: Callable[..., Any]) -> Callable[[Read], Read]:
    """Return a decorator that registers a function as the reader of calls of torch functions.

    The decorated function takes the arguments of a call of one of ``functions``. It returns the
    operation that the call computes, or ``None`` if it computes none of the known kinds.

    Raises:
        ValueError: torch does not dispatch one of the functions, so that its calls are not seen.
    """
    for function in functions:
        require_dispatched(function)

    def add(read: Read) -> Read:
        READERS.update(dict.fromkeys(functions, read))
        return read

    return add


def entry(
    *functions: Callable[..., Any], settings: Sequence[str] = ()
) -> Callable[[Callable[..., Activation]], Callable[..., Activation]]:
    """Return a decorator that registers torch functions as names of an activation.

    The decorated function returns the :class:`Activation`. Calls of the torch functions are then
    recognised as this activation.

    Args:
        functions: torch functions with the arguments input, ``settings`` and ``inplace``, in this
            order. A function whose name ends in an underscore writes into its input.
        settings: names of the arguments after the input, which the decorated function also takes,
            each with a default.

    Raises:
        ValueError: torch does not dispatch one of the functions, or the slope or the inverse that
            the activation states contradicts its values.
    """

    def add(make: Callable[..., Activation]) -> Callable[..., Activation]:
        _check(make())
        for function in functions:
            reads(function)(_reader(make, settings, function.__name__.endswith("_")))
        return make

    return add


def require_dispatched(function: Callable[..., Any]) -> None:
    """Raise ``ValueError`` if torch does not report the calls of a function to function modes.

    Torch does not report calls of plain Python functions outside of torch, unless
    ``torch.overrides.wrap_torch_function`` decorates these functions.
    """
    is_plain = isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
    if is_plain and not function.__module__.startswith("torch"):
        raise ValueError(
            f"torch does not dispatch {function.__name__}, so that no attack would meet it; "
            "decorate it with torch.overrides.wrap_torch_function(lambda input: (input,))."
        )


def _check(activation: Activation) -> None:
    """Raise ``ValueError`` if the slope or the inverse of an activation contradicts its function.

    Slope and inverse are compared with the values of the function and of its derivative on a grid
    of inputs between −3 and 3.
    """
    if activation.slope is None or activation.inverse is None:
        return
    # The points of this grid avoid most kinks, at which the slope is not defined.
    places = torch.linspace(-2.93, 2.97, 30, dtype=torch.float64)
    outputs, slopes, _ = activation.parts(places)
    known = activation.invertible(outputs)
    for name, found, expected in (
        ("slope", activation.slope(outputs), slopes),
        ("inverse", activation.target(outputs)[known], places[known]),
    ):
        if not torch.allclose(found.to(expected), expected, rtol=1e-4, atol=1e-5):
            raise ValueError(f"the {name} of {activation.name} contradicts its function.")


def _reader(make: Callable[..., Activation], settings: Sequence[str], in_place: bool) -> Read:
    names = ("input", *settings, "inplace")

    def read(*args: Any, **kwargs: Any) -> Elementwise | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        inputs, writes = given.pop("input", None), given.pop("inplace", False)
        if not isinstance(inputs, Tensor) or not given.keys() <= set(settings):
            return None
        return Elementwise(inputs, make(**given), in_place or bool(writes))

    return read


RELU = Activation(
    "relu",
    torch.relu,
    slope=lambda a: (a > 0).to(a.dtype),
    inverse=lambda a: a,
    low=0.0,
    ends=(0.0, math.inf),
    kinks=((0.0, 1.0),),
    is_relu=True,
)

IDENTITY = Activation("identity", lambda z: z, slope=torch.ones_like, inverse=lambda a: a)
"""The activation that changes nothing, such as that of the last layer, which gives the logits."""


def leaky_relu(tilt: float | Tensor) -> Activation:
    """Return the activation ``max(z, 0) + tilt · min(z, 0)``.

    The result has no inverse if the tilt is a tensor, which may be trained, or if the tilt is ≤ 0.
    """
    kinks = ((0.0, 1 - tilt),)
    if isinstance(tilt, Tensor):
        return Activation("prelu", lambda z: torch.where(z > 0, z, tilt * z), kinks=kinks)
    leaky = Activation("leaky_relu", lambda z: F.leaky_relu(z, tilt), kinks=kinks)
    if tilt <= 0:
        return leaky
    return Activation(
        leaky.name,
        leaky.function,
        slope=lambda a: torch.where(a > 0, 1.0, tilt).to(a.dtype),
        inverse=lambda a: torch.where(a > 0, a, a / tilt),
        kinks=kinks,
    )


@entry(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.sigmoid_, Tensor.sigmoid_)
def sigmoid() -> Activation:
    """Return the activation ``1 / (1 + e⁻ᶻ)``."""
    return Activation(
        "sigmoid", torch.sigmoid, lambda a: a * (1 - a), lambda a: a.logit(INSIDE), 0.0, 1.0
    )


@entry(torch.tanh, Tensor.tanh, F.tanh, torch.tanh_, Tensor.tanh_)
def tanh() -> Activation:
    """Return the activation ``tanh z``."""
    return Activation(
        "tanh",
        torch.tanh,
        lambda a: 1 - a.square(),
        lambda a: a.clamp(-1 + INSIDE, 1 - INSIDE).atanh(),
        -1.0,
        1.0,
    )


@entry(F.softsign)
def softsign() -> Activation:
    """Return the activation ``z / (1 + |z|)``."""
    return Activation(
        "softsign",
        F.softsign,
        lambda a: (1 - a.abs()).square(),
        lambda a: a / (1 - a.abs()).clamp_min(INSIDE),
        -1.0,
        1.0,
    )


@entry(F.elu, F.elu_, settings=("alpha",))
def elu(alpha: float = 1.0) -> Activation:
    """Return the activation z if z > 0, else ``α (eᶻ − 1)``. Its slope jumps at 0 unless α = 1."""
    return Activation(
        "elu",
        lambda z: F.elu(z, alpha),
        lambda a: torch.where(a > 0, 1.0, a + alpha),
        lambda a: torch.where(a > 0, a, (a / alpha).clamp_min(-1 + INSIDE).log1p()),
        -alpha,
        kinks=((0.0, 1 - alpha),) if alpha != 1 else (),
    )


@entry(F.celu, torch.celu, torch.celu_, settings=("alpha",))
def celu(alpha: float = 1.0) -> Activation:
    """Return the activation z if z > 0, else ``α (e^(z/α) − 1)``."""
    return Activation(
        "celu",
        lambda z: F.celu(z, alpha),
        lambda a: torch.where(a > 0, 1.0, 1 + a / alpha),
        lambda a: torch.where(a > 0, a, alpha * (a / alpha).clamp_min(-1 + INSIDE).log1p()),
        -alpha,
    )


@entry(F.selu, torch.selu, torch.selu_)
def selu() -> Activation:
    """Return the activation λ z if z > 0, else ``λ α (eᶻ − 1)``.

    λ ≈ 1.0507 and α ≈ 1.6733 are the constants of Klambauer et al. (2017).
    """
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return Activation(
        "selu",
        F.selu,
        lambda a: torch.where(a > 0, scale, a + scale * alpha),
        lambda a: torch.where(
            a > 0, a / scale, (a / (scale * alpha)).clamp_min(-1 + INSIDE).log1p()
        ),
        -scale * alpha,
        kinks=((0.0, scale - scale * alpha),),
    )


@entry(F.softplus, settings=("beta", "threshold"))
def softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    """Return the activation ``log(1 + e^(βz)) / β``, which is z if βz exceeds the threshold."""

    def inverse(outputs: Tensor) -> Tensor:
        scaled = beta * outputs.clamp_min(INSIDE)
        return torch.where(scaled > threshold, scaled, scaled.expm1().log()) / beta

    return Activation(
        "softplus",
        lambda z: F.softplus(z, beta, threshold),
        lambda a: torch.where(beta * a > threshold, 1.0, -(-beta * a).expm1()),
        inverse,
        0.0,
    )


@entry(F.logsigmoid)
def logsigmoid() -> Activation:
    """Return the activation ``−log(1 + e⁻ᶻ)``."""
    return Activation(
        "logsigmoid",
        F.logsigmoid,
        lambda a: -a.expm1(),
        lambda a: -(-a.clamp_max(-INSIDE)).expm1().log(),
        high=0.0,
    )


@entry(F.hardsigmoid, hard_sigmoid)
def hardsigmoid() -> Activation:
    """Return the activation ``z / 6 + 1/2``, clamped to [0, 1]."""
    return Activation(
        "hardsigmoid",
        hard_sigmoid,
        lambda a: ((a > 0) & (a < 1)).to(a.dtype) / 6,
        lambda a: 6 * a - 3,
        0.0,
        1.0,
        ends=(-3.0, 3.0),
        kinks=((-3.0, 1 / 6), (3.0, -1 / 6)),
    )


@entry(F.hardtanh, F.hardtanh_, settings=("min_val", "max_val"))
def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Activation:
    """Return the activation that clamps z to the interval from ``min_val`` to ``max_val``.

    Outputs strictly inside of the interval determine their inputs; an output at an end only bounds
    its input. The activation has an inverse only if 0 lies inside of the interval. Otherwise, as
    for ReLU6, about half of all inputs would lie outside of the interval.
    """
    is_open = min_val < 0 < max_val
    return Activation(
        "hardtanh",
        lambda z: z.clamp(min_val, max_val),
        (lambda a: ((a > min_val) & (a < max_val)).to(a.dtype)) if is_open else None,
        (lambda a: a) if is_open else None,
        min_val,
        max_val,
        ends=(min_val, max_val),
        kinks=((min_val, 1.0), (max_val, -1.0)),
    )


@entry(F.relu6)
def relu6() -> Activation:
    """Return the activation ``min(max(0, z), 6)``."""
    return replace(hardtanh(0.0, 6.0), name="relu6")


@entry(F.hardswish)
def hardswish() -> Activation:
    """Return the activation ``z · min(max(0, z + 3), 6) / 6``.

    It has no inverse, as two inputs give each negative output.
    """
    return Activation("hardswish", F.hardswish, kinks=((-3.0, -0.5), (3.0, -0.5)))


@entry(F.gelu, settings=("approximate",))
def gelu(approximate: str = "none") -> Activation:
    """Return the activation ``z Φ(z)``, with the normal distribution function Φ.

    It has no inverse, as two inputs give each negative output. ``approximate`` is ``none``, or
    ``tanh`` for torch's approximation of Φ.
    """
    return Activation("gelu", lambda z: F.gelu(z, approximate=approximate))


@entry(F.silu)
def silu() -> Activation:
    """Return the activation ``z σ(z)``, with the sigmoid σ.

    It has no inverse, as two inputs give each negative output.
    """
    return Activation("silu", F.silu)


@entry(F.mish)
def mish() -> Activation:
    """Return the activation ``z tanh(log(1 + eᶻ))``.

    It has no inverse, as two inputs give each negative output.
    """
    return Activation("mish", F.mish)


@reads(F.relu, torch.relu, Tensor.relu)
def _plain(input: Any, inplace: Any = False) -> Elementwise:
    return Elementwise(input, RELU, bool(inplace))


reads(torch.relu_, Tensor.relu_)(partial(_plain, inplace=True))


@reads(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, torch.clamp_min, Tensor.clamp_min)
def _clamp(
    input: Any, min: Any = None, max: Any = None, in_place: bool = False, **_: Any
) -> Elementwise | None:
    if max is not None or not _is_zero(min):
        return None
    return Elementwise(input, RELU, in_place) if _keeps_shape(input, min) else None


reads(
    torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_, torch.clamp_min_, Tensor.clamp_min_
)(partial(_clamp, in_place=True))  # fmt: skip


@reads(F.threshold, torch.threshold)
def _threshold(input: Any, threshold: Any, value: Any, inplace: Any = False) -> Elementwise | None:
    if not (_is_zero(threshold) and _is_zero(value)):
        return None
    return Elementwise(input, RELU, bool(inplace))


reads(torch.threshold_)(partial(_threshold, inplace=True))


@reads(torch.maximum, Tensor.maximum, torch.max, Tensor.max, torch.fmax, Tensor.fmax)
def _maximum(input: Any, other: Any = None, *_: Any, **__: Any) -> Elementwise | None:
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return None  # the call computes the maximum of one tensor, or along an axis
    for inputs, least in ((input, other), (other, input)):
        if _keeps_shape(inputs, least) and _is_zero(least):
            return Elementwise(inputs, RELU)
    return None


@reads(Tensor.where)
def _where_method(input: Any, condition: Any, other: Any) -> Elementwise | None:
    return _where(condition, input, other)


@reads(torch.masked_fill, Tensor.masked_fill)
def _masked_fill(input: Any, mask: Any, value: Any) -> Elementwise | None:
    return _where(mask, value, input)


@reads(torch.where)
def _where(condition: Any, input: Any = None, other: Any = None, **_: Any) -> Elementwise | None:
    """Return the ReLU that a choice between two values computes, or ``None`` if it is no ReLU.

    Where the condition is true, ``input`` is chosen, else ``other``; each is a tensor or a number.
    The call is a ReLU if one of them is zero and is chosen exactly where the other is not positive.
    """
    if not (isinstance(condition, Tensor) and condition.dtype == torch.bool):
        return None
    for inputs, filled, is_kept in ((input, other, True), (other, input, False)):
        if not isinstance(inputs, Tensor) or inputs.shape != condition.shape:
            continue
        kept = condition if is_kept else ~condition
        if _keeps_shape(inputs, filled) and _is_zero(filled) and _is_mask(kept, inputs):
            return Elementwise(inputs, RELU)
    return None


@reads(torch.mul, Tensor.mul, torch.multiply, Tensor.multiply)
def _product(input: Any, other: Any, **_: Any) -> Elementwise | None:
    tensors = isinstance(input, Tensor) and isinstance(other, Tensor)
    if not tensors or input.shape != other.shape:
        return None
    for inputs, mask in ((input, other), (other, input)):
        # Few products have a mask as a factor. A look at the first entry rules most of the other
        # products out.
        if _first(mask) not in (0, 1) or not _keeps_shape(inputs, mask):
            continue
        if _is_mask(mask, inputs) and (mask.dtype == torch.bool or not _keeps_all(mask)):
            return Elementwise(inputs, RELU)
    return None


@reads(F.leaky_relu)
def _leaky(input: Any, negative_slope: Any = 0.01, inplace: Any = False) -> Elementwise:
    return _tilted(input, float(negative_slope), bool(inplace))


reads(F.leaky_relu_)(partial(_leaky, inplace=True))


@reads(torch.prelu, Tensor.prelu)
def _parametric(input: Any, weight: Any) -> Elementwise:
    if weight.numel() > 1:  # one slope for each channel
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    return _tilted(input, weight)


@reads(F.rrelu, torch.rrelu)
def _randomised(
    input: Any,
    lower: Any = 1 / 8,
    upper: Any = 1 / 3,
    training: Any = False,
    inplace: Any = False,
    **_: Any,
) -> Elementwise | None:
    if training and lower != upper:
        return None
    return _tilted(input, (lower + upper) / 2, bool(inplace))


reads(torch.rrelu_)(partial(_randomised, inplace=True))


def _tilted(inputs: Tensor, slope: float | Tensor, in_place: bool = False) -> Elementwise:
    is_trained = isinstance(slope, Tensor) and slope.requires_grad
    activation = leaky_relu(slope) if is_trained or not _is_zero(slope) else RELU
    return Elementwise(inputs, activation, in_place)


def _keeps_shape(inputs: Tensor, other: Any) -> bool:
    """Return whether inputs plus a number or tensor keep the inputs' shape and dtype."""
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
    """Return whether a mask is ``1[z > 0]``, or ``1[z ≥ 0]`` but not all ones, for inputs z."""
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
    """Return the plain tensor inside the wrappers of ``torch.func``'s transforms.

    Inside ``vmap``, a tensor has no single truth value, but the plain tensor, which holds all
    samples, has one.
    """
    while _functorch.is_functorch_wrapped_tensor(values):
        values = _functorch.get_unwrapped(values)
    return values
