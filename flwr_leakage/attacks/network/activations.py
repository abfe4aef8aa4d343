"""The activations that attacks know: one short entry each, by whatever name a model calls them.

To add an activation, write a function that returns its :class:`Activation`, and decorate it with
:func:`entry` and the torch functions that compute it. Every attack then knows it. Attacks that walk
a network backwards use ``slope``, ``inverse`` and the ends of its range. Attacks that blur a
network use ``kinks``. Attacks that linearise one use the first two derivatives of ``function``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.forward import hard_sigmoid

Elementary = Callable[[Tensor], Tensor]

SATURATED = 1e-6
"""Distance from an end of a bounded range, as a share of the range, up to which an output counts as
that end. Solved features are exact to about 1e-9 of their range."""

INSIDE = 1e-12
"""Distance from an asymptote, as a share of one unit, at which outputs are cut before they are
inverted: rounding can carry an output of float64 to the asymptote itself."""


@dataclass(frozen=True)
class Activation:
    """An elementwise function φ, with what its output a = φ(z) tells about its input z.

    Attributes:
        name: what messages call it.
        function: φ.
        slope: φ'(z) as a function of a; ``None`` where a does not determine it.
        inverse: z as a function of a, where ``invertible``; ``None`` where several z have one a.
        low: infimum of the outputs.
        high: supremum of the outputs.
        ends: the inputs up to which φ is constant at ``low``, and from which on at ``high``;
            infinite where it only tends there.
        kinks: inputs at which φ' jumps, each with the size of the jump.
        is_relu: whether it is ``max(0, z)``.
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
        """Where a determines z. Elsewhere z lies beyond one of the ends, as of a ReLU's zeros."""
        width = self.high - self.low
        margin = SATURATED * width if math.isfinite(width) else 0.0
        inside = torch.ones_like(outputs, dtype=torch.bool)
        if math.isfinite(self.ends[0]):
            inside = inside & (outputs > self.low + margin)
        if math.isfinite(self.ends[1]):
            inside = inside & (outputs < self.high - margin)
        return inside

    def target(self, outputs: Tensor) -> Tensor:
        """The input z of each output a, or the end that z lies beyond."""
        assert self.inverse is not None
        known = self.invertible(outputs)
        return torch.where(known, self.inverse(outputs), self._end(outputs))

    def binds(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Whether an output a says that its z is another: not where z is beyond a's end, too."""
        end = self._end(outputs)
        beyond = torch.where(self._is_high(outputs), inputs < end, inputs > end)
        return self.invertible(outputs) | beyond

    def _end(self, outputs: Tensor) -> Tensor:
        first, last = (end if math.isfinite(end) else 0.0 for end in self.ends)
        return torch.where(self._is_high(outputs), last, first).to(outputs.dtype)

    def _is_high(self, outputs: Tensor) -> Tensor:
        """Whether a constant output is the one at the upper end."""
        if not math.isfinite(self.ends[1]):
            return torch.zeros_like(outputs, dtype=torch.bool)
        return outputs > (self.low + self.high) / 2

    def parts(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """φ(z), φ'(z) and φ''(z) where they exist; of a ReLU φ'(0) = 0."""
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
    """One call that computes an activation.

    Attributes:
        inputs: z, of any shape.
        activation: φ.
        in_place: whether the call writes its outputs into z.
    """

    inputs: Tensor
    activation: Activation
    in_place: bool = False

    def answer(self, outputs: Tensor) -> Tensor:
        """What the call returns where ``outputs`` stand for its own.

        Outputs that autograd computed from z itself must have been computed from a copy of z.
        """
        return self.inputs.copy_(outputs) if self.in_place else outputs


Read = Callable[[tuple[Any, ...], Mapping[str, Any]], Elementwise | None]
READERS: dict[Callable[..., Any], Read] = {}
"""How a call of a torch function is read, by the function."""


def entry(
    *functions: Callable[..., Any], settings: Sequence[str] = ()
) -> Callable[[Callable[..., Activation]], Callable[..., Activation]]:
    """Let calls of torch functions be read as the activation that the decorated function returns.

    Args:
        functions: of an input, then of ``settings``, then of ``inplace``. A function whose name
            ends in an underscore writes into its input.
        settings: names of the arguments after the input, which the decorated function takes, too.
    """

    def add(make: Callable[..., Activation]) -> Callable[..., Activation]:
        for function in functions:
            READERS[function] = _reader(make, settings, function.__name__.endswith("_"))
        return make

    return add


def _reader(make: Callable[..., Activation], settings: Sequence[str], in_place: bool) -> Read:
    names = ("input", *settings, "inplace")

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Elementwise | None:
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
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
"""The activation of the last layer, whose outputs are the logits."""


def leaky_relu(tilt: float | Tensor) -> Activation:
    """``max(z, 0) + tilt · min(z, 0)``; with a tilt that is a tensor, and may be trained, it has no
    inverse, and neither has one of a tilt ≤ 0.
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
    """``1 / (1 + e⁻ᶻ)``."""
    return Activation(
        "sigmoid", torch.sigmoid, lambda a: a * (1 - a), lambda a: a.logit(INSIDE), 0.0, 1.0
    )


@entry(torch.tanh, Tensor.tanh, F.tanh, torch.tanh_, Tensor.tanh_)
def tanh() -> Activation:
    """``tanh z``."""
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
    """``z / (1 + |z|)``."""
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
    """Z where it is positive, else ``α (eᶻ − 1)``; its slope jumps at 0 unless α = 1."""
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
    """Z where it is positive, else ``α (e^(z/α) − 1)``."""
    return Activation(
        "celu",
        lambda z: F.celu(z, alpha),
        lambda a: torch.where(a > 0, 1.0, 1 + a / alpha),
        lambda a: torch.where(a > 0, a, alpha * (a / alpha).clamp_min(-1 + INSIDE).log1p()),
        -alpha,
    )


@entry(F.selu, torch.selu, torch.selu_)
def selu() -> Activation:
    """λ z where z is positive, else ``λ α (eᶻ − 1)``, of Klambauer et al. 2017."""
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
    """``log(1 + e^(βz)) / β``, and z where βz is above the threshold."""

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
    """``−log(1 + e⁻ᶻ)``."""
    return Activation(
        "logsigmoid",
        F.logsigmoid,
        lambda a: -a.expm1(),
        lambda a: -(-a.clamp_max(-INSIDE)).expm1().log(),
        high=0.0,
    )


@entry(F.hardsigmoid, hard_sigmoid)
def hardsigmoid() -> Activation:
    """``z / 6 + 1/2``, cut to [0, 1]."""
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
    """z, cut to an interval. One that ends at 0, as that of ReLU6, tells half of its inputs by a
    bound only, and counts as not invertible.
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
    """``min(max(0, z), 6)``."""
    return replace(hardtanh(0.0, 6.0), name="relu6")


@entry(F.hardswish)
def hardswish() -> Activation:
    """``z · min(max(0, z + 3), 6) / 6``: two inputs have one output where it is negative."""
    return Activation("hardswish", F.hardswish, kinks=((-3.0, -0.5), (3.0, -0.5)))


@entry(F.gelu, settings=("approximate",))
def gelu(approximate: str = "none") -> Activation:
    """``z Φ(z)``: two inputs have one output where it is negative."""
    return Activation("gelu", lambda z: F.gelu(z, approximate=approximate))


@entry(F.silu)
def silu() -> Activation:
    """``z σ(z)``: two inputs have one output where it is negative."""
    return Activation("silu", F.silu)


@entry(F.mish)
def mish() -> Activation:
    """``z tanh(log(1 + eᶻ))``: two inputs have one output where it is negative."""
    return Activation("mish", F.mish)
