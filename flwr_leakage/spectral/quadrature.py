"""Estimate traces of functions of AᵀA by random probes, each bounded by two quadrature rules."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import gammaincinv
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.spectral.bidiagonal import Bidiagonal
from flwr_leakage.spectral.estimate import Estimate, remaining_growth

SpectralFunction = Callable[[Tensor, Tensor], Tensor]
"""A map from k eigenvalues of AᵀA for each of S matrices A (S, k), and the largest one λmax (S, 1),
to values (S, k)."""

CONFIDENCE = 0.99
"""Probability that a trace's error from random sampling lies within its error bar."""


@dataclass(frozen=True)
class Trace:
    """An estimate of Σᵢ f(λᵢ) over the eigenvalues λᵢ of AᵀA, for each of S matrices A.

    Random probe vectors z give numbers zᵀf(AᵀA)z, whose mean is the sum; two quadrature rules bound
    each number from below and above.

    Attributes:
        estimate: the mean over probes of the middle between both rules, if the quadrature of every
            probe has converged, else the mean of the lower rule. Its residual includes the
            quadrature's error and, with a probability of 99 %, the sampling error.
        lower: (S,) the mean of the lower rule over probes.
        upper: (S,) the mean of the upper rule over probes.
        standard_error: (S,) absolute standard error of the mean from sampling probes.
        largest: (S,) the largest eigenvalue of AᵀA that a probe has found, a lower bound of λmax.
    """

    estimate: Estimate
    lower: Float[Tensor, " S"]
    upper: Float[Tensor, " S"]
    standard_error: Float[Tensor, " S"]
    largest: Float[Tensor, " S"]


def spectral_sum(
    operator: LinearOperator,
    function: SpectralFunction,
    generator: Draws,
    num_probes: int = 10,
    max_steps: int = 60,
    tolerance: float = 0.02,
    order: int = 0,
) -> Trace:
    """Return Σᵢ λᵢᵖ g(λᵢ) over the eigenvalues λᵢ of AᵀA, by stochastic quadrature.

    The method is that of Ubaru, Chen and Saad (2017). With f(λ) = λᵖ g(λ), the expectation of
    zᵀf(AᵀA)z over random sign vectors z is the sum. k steps of Golub and Kahan's process from z
    give two quadrature rules of zᵀf(AᵀA)z, that of Gauss and that of Radau with a node at 0. If the
    derivatives of g alternate in sign, as those of 1/(λ + ε) and 1/(λ + ε)² do, Gauss' rule is a
    lower bound and Radau's an upper one (Golub and Meurant 1994, section 4). With p = 1, the factor
    λ is part of the measure, so that λ/(λ + ε)² is bounded, too. The process of a probe z stops
    once both rules agree to the tolerance, and the estimate of λmax has stopped growing.

    The variance of zᵀf(AᵀA)z is at most 2 Σᵢ f(λᵢ)² (Hutchinson 1990), which the nodes estimate.
    The error bar of the mean is that of a χ² variable of the same mean and variance.

    Args:
        operator: S matrices A.
        function: the map g from eigenvalues (S, k) and λmax (S, 1) to values (S, k). A damping may
            be relative to λmax. If the derivatives of g do not alternate in sign, both rules are
            estimates only.
        generator: the generator of the probes.
        num_probes: number of vectors z.
        max_steps: largest number of steps of each probe, of two products each.
        tolerance: relative error of the quadrature.
        order: the power p, 0 or 1.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}.")
    if order not in (0, 1):
        raise ValueError(f"order must be 0 or 1, got {order}.")
    first = operator.products
    probes = []
    for _ in range(num_probes):
        signs = sign_rows((operator.num_blocks, operator.num_inputs), generator)
        start = signs.to(dtype=operator.dtype, device=operator.device)
        probes.append(_probe(operator, start, function, max_steps, tolerance, order))
    lows, highs, squares, errors, tops = (torch.stack(each) for each in zip(*probes, strict=True))
    lower, upper = lows.mean(0), highs.mean(0)
    converged = errors.amax(0) <= tolerance
    mean = torch.where(converged, (lower + upper) / 2, lower)
    variance = 2 * squares.mean(0) / num_probes
    relative = errors.amax(0) + sampling_error(mean, variance)
    estimate = Estimate(
        mean,
        converged,
        relative,
        operator.products - first,
        f"stochastic quadrature, {num_probes} probes",
    )
    return Trace(estimate, lower, upper, variance.sqrt(), tops.amax(0))


def sampling_error(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the relative half-width (S,) of a 99 % confidence interval for the trace of F ⪰ 0.

    The trace T is estimated by a mean of zᵀFz over random z, taken for a scaled χ² variable with ν
    = 2·mean²/variance degrees of freedom. The interval holds all T for which mean/T lies in the
    central 99 % of χ²_ν/ν. Its larger half is returned, relative to the mean.

    Args:
        mean: (S,) the means.
        variance: (S,) the variances of these means.
    """
    freedom = 2 * mean.double() ** 2 / variance.clamp_min(torch.finfo(torch.float64).tiny)
    freedom = freedom.clamp(1.0, 1e12).nan_to_num(1.0)
    half = freedom.numpy() / 2
    low = torch.as_tensor(2 * gammaincinv(half, (1 - CONFIDENCE) / 2)) / freedom
    high = torch.as_tensor(2 * gammaincinv(half, (1 + CONFIDENCE) / 2)) / freedom
    return torch.maximum(1 / low - 1, 1 - 1 / high)


def _probe(
    operator: LinearOperator,
    start: Tensor,
    function: SpectralFunction,
    max_steps: int,
    tolerance: float,
    order: int,
) -> tuple[Tensor, ...]:
    """Return five tensors (S,) from Golub and Kahan's process of one probe z, ``start`` (S, N), for
    each of S matrices A: zᵀf(AᵀA)z by the lower and by the upper of two quadrature rules; an
    estimate of zᵀf(AᵀA)²z; the relative error of the middle between both rules, or the growth that
    the largest eigenvalue λmax of AᵀA may still have if larger; and the estimate of λmax. f(λ) =
    λᵖ g(λ), with g ``function``, see :func:`spectral_sum`, and p ``order``. The process stops at
    the relative error ``tolerance``.
    """
    process = Bidiagonal(operator, start)
    limit = min(max_steps, operator.num_inputs)
    blocks, next_check = torch.arange(operator.num_blocks), 1
    tops: list[Tensor] = []
    found: list[tuple[Tensor, ...]] = []
    while len(blocks):
        process.step()
        steps = process.num_steps
        # Convergence is checked at fixed steps, so that no result depends on the other matrices.
        due = steps >= next_check or steps >= limit
        if not (due or bool(process.exhausted.any())):
            continue
        lower, upper, square, top = _read(process, function, order)
        value, error = (lower + upper) / 2, (upper - lower) / 2
        error = error / value.abs().clamp_min(torch.finfo(value.dtype).tiny)
        growth = remaining_growth([*tops, *[top] * (steps - len(tops))])
        growth = torch.where(process.exhausted.cpu(), 0.0, growth)
        relative = torch.where(value == 0, 0.0, torch.maximum(error, growth)).nan_to_num(torch.inf)
        leaving = process.exhausted.cpu() | torch.tensor(steps >= limit)
        if due:
            next_check = steps + max(1, steps // 10)
            tops += [top] * (steps - len(tops))
            leaving = leaving | (relative <= tolerance)
        if bool(leaving.any()):
            # A matrix that has its result takes no part in further steps.
            results = (blocks, lower, upper, square, relative, top)
            found.append(tuple(each[leaving] for each in results))
            rest = (~leaving).nonzero()[:, 0]
            blocks, tops = blocks[rest], [entry[rest] for entry in tops]
            process = process.narrow(rest)
    order_of, *parts = (torch.cat(column) for column in zip(*found, strict=True))
    return tuple(part[order_of.argsort()] for part in parts)


def _read(
    process: Bidiagonal, function: SpectralFunction, order: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors (S,) from Golub and Kahan's process for S matrices A, which started at a
    probe z: zᵀf(AᵀA)z by the lower and by the upper of two quadrature rules, an estimate of
    zᵀf(AᵀA)²z, and one of the largest eigenvalue of AᵀA. f(λ) = λᵖ g(λ), with g ``function`` and p
    ``order``.
    """
    rules = process.rules(order)
    top = rules[0][0][:, :1]
    ends = []
    for nodes, weights in rules:
        images = torch.where(weights > 0, function(nodes, top), 0.0)
        ends.append((weights * images).sum(1))
        square = (weights * nodes**order * images**2).sum(1)
    lower, upper = torch.stack(ends).aminmax(dim=0)
    return lower, upper, square, top[:, 0]
