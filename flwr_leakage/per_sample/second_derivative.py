"""Check a model's second derivative J by finite differences of its gradient."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.forward import gradient_by_autograd
from flwr_leakage.operators import row_norms
from flwr_leakage.params import ravel
from flwr_leakage.per_sample.samples import Samples
from flwr_leakage.randomness import make_generator

ALLOWED = 1e-5
"""Relative distance up to which a product with J, the derivative of a sample's gradient by its
input, and a finite difference of that gradient count as equal in float64. A finite difference is
itself inexact, so that a smaller limit might refuse right derivatives."""
MOST_ALLOWED = 1e-2
"""Largest relative distance between a product with J, the derivative of a sample's gradient by its
input, and a finite difference that may be allowed for rounding. If rounding needs more, J is not
checked."""
FIRST_STEP = 1e-6
"""First step h of the differences (g(x + hv) − g(x − hv))/2h of a gradient g, relative to the root
mean square of the input x. It is small, so that few ReLUs change sides."""
OTHER_STEPS = (1e-7, 1e-5, 1e-4, 1e-3)
_JITTER = 0.1


@dataclass(frozen=True)
class SecondDerivative:
    """The result of a check of a model's second derivatives.

    Attributes:
        fault: the reason why the derivatives are wrong, in words; empty if they are right.
        one_by_one: the reason why the derivatives are computed by plain autograd, one sample at a
            time; empty if they are not.
        unchecked: the reason why the derivatives could not be checked; empty if they were.
    """

    fault: str = ""
    one_by_one: str = ""
    unchecked: str = ""


def product_is_right(
    samples: Samples, rounding: float, direction: Float[Tensor, " N"], product: Float[Tensor, " P"]
) -> bool:
    """Return whether a product Jᵀv agrees with a finite difference of gradients in float64.

    J is the Jacobian of the gradient of a single sample, the first of ``samples``. ``direction`` is
    v, and ``product`` is Jᵀv. The test costs one gradient.

    If they agree and v is random, J is right. If they do not, nothing is known: a ReLU may change
    sides near the sample, or the product's dtype may be too imprecise. ``rounding`` is the
    product's relative error, see ``Samples.rounding``.
    """
    scale = FIRST_STEP * float(samples.inputs.norm()) / float(direction.norm())
    step = (scale or FIRST_STEP) * direction.double()
    twice = samples[[0, 0]].to(torch.float64)
    twice = twice.with_inputs(twice.inputs + torch.stack([step, -step]))
    distance = _first_less_second(twice) / (2 * (scale or FIRST_STEP)) - product
    return float(distance.norm()) <= max(ALLOWED, 10 * rounding) * float(product.norm())


def _first_less_second(samples: Samples) -> Tensor:
    """Return the first sample's gradient minus the second's, flat (P,), by one pass over both."""
    gradient_map, params, batch = samples.gradient_map, samples.params, samples.batch
    wanted = {name: value for name, value in params.items() if name in gradient_map.trained}

    def difference(part: Mapping[str, Tensor]) -> Tensor:
        logits = gradient_map.logits({**params, **part}, batch.inputs, samples.buffers)
        first, second = (
            gradient_map.loss(logits[rows], batch.targets[rows]) for rows in (slice(1), slice(1, 2))
        )
        return first - second

    found = gradient_by_autograd(difference, wanted, (batch.inputs, batch.targets))
    return ravel({name: found.get(name, torch.zeros_like(v)) for name, v in params.items()})


def check_second_derivative(sample: Samples, seed: int = 0) -> SecondDerivative:
    """Return the result of a check of the Jacobian J of a single sample's gradient by its input.

    J is computed by ``torch.func``, and if this is wrong, by plain autograd. It is compared with
    finite differences of the gradient in float64. The check costs two gradients, and one product
    with J and its graphs. If something is wrong, it costs more. ``seed`` is that of the random
    directions.
    """
    fault, error = _fault(sample, seed)
    if not (fault or error):
        return SecondDerivative()
    reason = "torch.func's second derivative of this model is wrong" if fault else error
    if not sample.gradient_map.one_by_one:
        plain = sample.gradient_map.differentiated_by_autograd(reason)
        if _fault(replace(sample, gradient_map=plain), seed) == ("", ""):
            return SecondDerivative(one_by_one=reason)
    return SecondDerivative(fault=fault, unchecked=error)


def _fault(sample: Samples, seed: int) -> tuple[str, str]:
    """Return two texts: why the model's second derivative is wrong at a sample, empty if it is not;
    and why the second derivative cannot be checked, empty if it was checked.
    """
    try:
        return second_derivative_fault(sample, seed)
    except Exception as error:  # a model may not support float64, or may raise any other error
        lines = str(error).strip().splitlines() or [""]
        return "", f"{type(error).__name__}: {lines[0][:200]}"


def second_derivative_fault(sample: Samples, seed: int = 0) -> tuple[str, str]:
    """Return two texts: why J is not the derivative of a sample's gradient g by its input x, empty
    if it is or may be; and why this cannot be checked, empty if it was checked.

    In float64, Jᵀv is compared with (g(x + hv) − g(x − hv))/2h, in a random direction v. Custom
    autograd functions may have a right backward that cannot be differentiated itself
    (``once_differentiable``, ``detach``, NumPy inside), for which PyTorch gives a wrong J without
    an error. Gradients of networks with ReLU or max pooling jump where a unit changes sides. So x
    is moved to a random point nearby, where no two entries of x are equal, as they may be in a
    window of max pooling. A mismatch counts only if differences of two steps agree ten times better
    with each other than with J, and only if a second point says the same.
    """
    # The allowed distance grows with the rounding error of the product: a user's own loss may lose
    # digits by cancellation, even in float64, if the model is sure of the sample's class.
    allowed = max(ALLOWED, 10 * float(sample.rounding()[0]))
    if allowed > MOST_ALLOWED:
        return "", "rounding leaves too few digits of the loss's gradient to compare"
    distances: list[float] = []
    for attempt in range(2):
        generator = make_generator(seed, purpose=f"second derivative {attempt}")
        distances.append(_distance(sample, generator, allowed))
        if distances[-1] <= allowed:
            return "", ""
    if max(distances) == torch.inf:
        return "", "differences of the gradient do not settle, as if it jumped everywhere"
    fault = (
        f"the model's second derivative is not that of its gradient: along a random direction, "
        f"the product with J is {min(distances):.2g} away from differences of the gradient "
        f"(relative; {allowed:.2g} is allowed). The backward of a custom autograd.Function that "
        f"cannot be differentiated (once_differentiable, detach, NumPy) is the usual cause. Scores "
        f"that need gradients only are not concerned"
    )
    return fault, ""


def _distance(sample: Samples, generator: torch.Generator, allowed: float) -> float:
    """Return the relative distance of Jᵀv from finite differences of a single sample's gradient, in
    float64. J is the gradient's Jacobian by the input, and v a random direction. The distance is 0
    if both agree to ``allowed``, and infinite if differences of two steps do not agree with each
    other.
    """
    x = sample.inputs
    scale = float(x.square().mean().sqrt()) or 1.0
    draws = torch.randn(2, *x.shape, dtype=x.dtype, generator=generator).to(x.device)
    moved = sample.with_inputs(x + _JITTER * scale * draws[0])
    direction = scale * draws[1]
    product = moved.jacobian().matvec(direction)
    seen: list[Tensor] = []
    for step in (FIRST_STEP, *OTHER_STEPS):
        difference = _difference(moved, step * direction) / (2 * step)
        length = torch.maximum(row_norms(difference), row_norms(product))
        seen.append(difference)
        if float(row_norms(difference - product)) <= allowed * float(length):
            return 0.0
    settled = [
        float(row_norms(first - product) / torch.maximum(row_norms(first), row_norms(product)))
        for first, second in combinations(seen, 2)
        if 10 * float(row_norms(first - second)) <= float(row_norms(first - product))
    ]
    return min(settled, default=torch.inf)


def _difference(sample: Samples, shift: Tensor) -> Tensor:
    """Return the difference g(x + shift) − g(x − shift) of a sample's gradient g."""
    ahead = sample.with_inputs(sample.inputs + shift).gradients()
    return ahead - sample.with_inputs(sample.inputs - shift).gradients()
