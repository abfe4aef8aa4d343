"""Solve for the features that convolutions take as inputs, from the convolutions' gradients.

Let a be the features and δ the derivatives of the loss by the convolutions' outputs. The weight
gradients give equations ``M(δ) a = T`` (:mod:`flwr_leakage.attacks.exact.weight_equations`). Let V
be the eigenvectors and λ the nonzero eigenvalues of ``MᵀM``. The least-squares solution is
``a = V λ⁻¹ Vᵀ Mᵀ T``. Its residual measures the noise of the equations, whatever its source:
float32 arithmetic, the rounding of parameters on the wire, or noise that the client added. With
residuals ``r = T − M a`` of n equations for each of C input channels, and rank k, the variances of
the noise and of the solution at position p are

    σ² = ‖r‖² / (C (n − k)),    Var a[p] = σ² (V λ⁻¹ Vᵀ)[p, p].

The equations of one output channel o may contradict those of all other channels. If there are
hardly more equations than unknowns, the solution meets even wrong equations, and r hides the
contradiction. So a test measures by how much ``‖r‖²`` falls if o is left out (Cook and Weisberg
1982, section 2.2), for each of the f equations of o that the other channels check. With the
residuals r_o of o and its block H_oo of ``H = M V λ⁻¹ Vᵀ Mᵀ``,

    s_o² = r_oᵀ (1 − H_oo)⁻¹ r_o / (C f),

whose mean is σ² if there is noise alone. For a channel that was left out already, 1 + H_oo stands
in place of 1 − H_oo, as the noise of the solution adds to the channel's own. A solution may meet
the equations of a wrong channel, so that no s_o exceeds the median by far. Then the test takes the
channel with the greatest ratio of s_o² to the σ² that remains without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.relu_walk import Use
from flwr_leakage.attacks.exact.weight_equations import Whitened, weight_equations

RANK_TOLERANCE = 1e-5
"""Share of the largest singular value of a layer's equations below which a direction of the layer's
input counts as not determined. The squares of larger singular values keep six digits in float64."""

CONTRADICTION = 5.0
"""An output channel contradicts all others if the root mean square s_o of its equations' residuals
exceeds this multiple of the median of s_o over the channels.
:mod:`flwr_leakage.attacks.exact.feature_equations` defines s_o, which allows for the channel's own
influence on the solution. Under noise alone, a root mean square of nine residuals or more exceeds
this once in 1e39 times."""

TRIMS = 5
"""Largest number of times that the equations about one layer's features are solved. After each time
but the last, output channels whose equations contradict the solution are left out. Wrong masks of
later ReLUs are corrected at most as many times."""


@dataclass(frozen=True)
class Solved:
    """The features that convolutions take in, as the convolutions' weight gradients determine them.

    Attributes:
        values: the least-squares solution (1, C, H, W), the shortest one if there are several.
        noise: (1, 1, H, W), the standard deviation of the error of ``values`` at each position; NaN
            if there are no more equations than unknowns.
        equations: the directions of the features that the gradients determine.
        contradicted: pairs (number of the convolution, output channel) whose equations were left
            out, as they contradict the others.
        limits: for each pair in ``contradicted``, the norm of the gradient's residual up to which
            the channel would agree.
    """

    values: Tensor
    noise: Tensor
    equations: Whitened
    contradicted: tuple[tuple[int, int], ...]
    limits: tuple[float, ...]

    @property
    def is_checked(self) -> bool:
        """Return whether there are more equations than unknown features.

        Only then do the equations show their noise.
        """
        return bool(self.noise.isfinite().all())


def solve_features(
    uses: Sequence[Use],
    errors: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Solved:
    """Return the features (1, C, H, W) that convolutions take, from their weight gradients.

    The features are a least-squares solution over the equations of all output channels. If a ReLU's
    mask has a wrong entry, the derivative of the loss in its channel is wrong too, and the
    channel's equations contradict all others. Such channels are left out, and the rest is solved
    again.

    The test compares a number s_o of each channel o: s_o² is the fall of the sum of squared
    residuals without the channel, per equation that other channels check. The channel contradicts
    the solution if s_o exceeds ``CONTRADICTION`` times the median of s_o over the channels, and s_o
    / ‖gradient of o‖ exceeds ``CONTRADICTION`` times the median of this ratio. (Rounding grows with
    the gradient, but less: large gradients have large residuals, and small gradients have large
    relative residuals.) The channel also contradicts the solution if s_o exceeds ``CONTRADICTION``
    times σ, the root mean square residual that remains without the channel. With less than twice as
    many equations as unknowns only this second rule counts, for one channel at a time.

    Args:
        uses: the convolutions that take the features, at least one.
        errors: the derivative of the loss at each convolution's outputs, (1, O, H', W').
        gradients: ∂L/∂W of each convolution's weight, (O, C, *kernel).

    Raises:
        ValueError: all errors are zero.
    """
    channels, height, width = uses[0].input_shape
    pairs = [
        weight_equations(error, gradient, use.input_shape, use.geometry)
        for use, error, gradient in zip(uses, errors, gradients, strict=True)
    ]
    matrix = torch.cat([m.flatten(0, 1) for m, _ in pairs])
    target = torch.cat([t.flatten(0, 1) for _, t in pairs])
    scale = torch.cat([t.flatten(1).norm(dim=1) for _, t in pairs])
    sizes = torch.cat([torch.full((len(m),), m.shape[1]) for m, _ in pairs])
    names = [(i, channel) for i, (m, _) in enumerate(pairs) for channel in range(len(m))]
    counts = [len(m) for m, _ in pairs]
    kept = torch.ones(len(sizes), dtype=torch.bool)
    for last in reversed(range(TRIMS)):
        rows = kept.repeat_interleave(sizes)
        equations = _whiten(matrix[rows], target[rows])
        residual = (matrix @ (equations.rows.T @ equations.values) - target)[rows]
        lost, remaining = float(residual.square().sum()), len(residual) - equations.num_equations
        checks = [
            _check(m, t, equations, k) for (m, t), k in zip(pairs, kept.split(counts), strict=True)
        ]
        free, falls = (torch.cat(list(values)) for values in zip(*checks, strict=True))
        size = (falls / (channels * free.clamp_min(1))).sqrt()
        limit = _typical(size, scale, kept) * CONTRADICTION
        # If there are hardly more equations than unknowns, the solution meets a wrong channel's
        # equations, and right channels seem to contradict it. Even then the squared residual ‖r‖²
        # falls most when the wrong channel's equations are left out. So one channel at a time is
        # left out by this fall.
        is_redundant = len(residual) >= 2 * height * width
        agrees = size <= limit if is_redundant else kept.clone()
        if bool((agrees == kept).all()):
            rest = (lost - falls).clamp_min(0) / (channels * (remaining - free).clamp_min(1))
            ratio = torch.where(kept & (size > 0), size.square() / rest.clamp_min(1e-300), 0.0)
            worst = int(ratio.argmax())
            agrees[worst] &= bool(ratio[worst] <= CONTRADICTION**2)
        if not last or bool((agrees == kept).all()):
            break
        kept = agrees
    sigma = (lost / (channels * remaining)) ** 0.5 if remaining else torch.nan
    spread = (equations.rows / equations.singular[:, None]).square().sum(0).sqrt()
    left_out = (~kept).nonzero()[:, 0].tolist()
    values = (equations.rows.T @ equations.values).T.reshape(1, channels, height, width)
    return Solved(
        # torch 2.13 returns wrong derivatives of BatchNorm for tensors that are not contiguous.
        values.contiguous(),
        (sigma * spread).reshape(1, 1, height, width),
        equations,
        tuple(names[i] for i in left_out),
        tuple(float(limit[i] * (channels * 2 * sizes[i]) ** 0.5) for i in left_out),
    )


def _typical(size: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """Return for each of O output channels the size of residuals that is typical for its gradient.

    ``size`` (O,) holds root mean squares of the channels' residuals. It is 0 for a channel if other
    channels check none of its equations. ``kept`` (O,) is true for channels whose equations are
    used, and ``scale`` (O,) holds the norms of the channels' gradients. The medians are over kept
    channels of nonzero size: the result is the larger of the median size, and of the median of
    ``size / scale`` times the channel's own scale. The result is infinite if there is no such
    channel.
    """
    compared = kept & (size > 0)
    if not bool(compared.any()):
        return torch.full_like(size, torch.inf)
    share = (size / scale.clamp_min(1e-300))[compared].median()
    return torch.maximum(size[compared].median(), share * scale)


def _check(
    matrix: Tensor, target: Tensor, equations: Whitened, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how well the equations of each output channel agree with those of all kept channels.

    All O output channels belong to one convolution with C input channels of P positions. ``matrix``
    M (O, K, P) holds K equations for each output channel, and ``target`` T (O, K, C) their
    right-hand sides. ``kept`` (O,) is true for channels whose equations are used, and ``equations``
    are the kept equations of all convolutions.

    Returns:
        For each output channel (O,) the number of its equations that other channels check, and by
        how much the sum of squared residuals falls without the channel, or would rise with a
        channel that is not kept.
    """
    residual = target - matrix @ (equations.rows.T @ equations.values)
    whitened = matrix @ (equations.rows.T / equations.singular)
    sign = torch.where(kept, -1.0, 1.0).to(matrix.dtype)[:, None, None]
    unit = torch.eye(matrix.shape[1], dtype=matrix.dtype)
    squares, vectors = torch.linalg.eigh(unit + sign * (whitened @ whitened.mT))
    # For a kept channel, an eigenvalue is one minus the leverage of a combination of the channel's
    # equations. It is 0 if no other channel checks the combination. Rounding leaves at most 1e-6,
    # which is far below ``least``.
    least = 1e-4
    is_checked = squares > least
    parts = (vectors.mT @ residual).square().sum(2) / squares.clamp_min(least)
    return is_checked.sum(1), torch.where(is_checked, parts, 0.0).sum(1)


def _whiten(matrix: Tensor, target: Tensor) -> Whitened:
    """Return equations ``M a = T`` about an unknown a (P, C) as ``V a = S⁻¹ Uᵀ T``.

    ``matrix`` is M (n, P), and ``target`` is T (n, C). M = U S V is the singular value
    decomposition, computed by the eigenvectors V of MᵀM. MᵀM has the squares of S as eigenvalues.
    So singular values of 1e-5 of the largest have six exact digits in float64, and one step of
    iterative refinement restores the solution's further digits.

    Raises:
        ValueError: M is zero.
    """
    squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
    determined = squares > RANK_TOLERANCE**2 * float(squares[-1])
    if not bool(determined.any()):
        raise ValueError("the errors are zero, and determine no features.")
    squares, rows = squares[determined], vectors[:, determined].T
    values = torch.zeros(len(rows), target.shape[1], dtype=target.dtype)
    for _ in range(2):
        residual = target - matrix @ (rows.T @ values)
        values = values + rows @ (matrix.T @ residual) / squares[:, None]
    return Whitened(rows, values, squares.sqrt())
