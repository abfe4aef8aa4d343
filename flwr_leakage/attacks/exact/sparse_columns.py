"""Sparse vectors in the span of a few known ones.

The gradient of a linear layer is ``∂L/∂W = S H`` with S = ∂L/∂Z (m × B) and H (B × n) the
samples' inputs. Behind the layer a ReLU makes every column of S zero where the sample leaves the
unit inactive; where the layer's inputs are outputs of a ReLU (or black pixels), every row of H has
zeros too. Both lie in spans that the gradient tells, and are sparse there as no mixture of several
samples is (SPEAR: Dimitrov et al. 2024; dictionary learning: SPEAR++ 2025).
"""

import numpy as np
import torch
from torch import Tensor

ROUNDS, DECAY, START = 60, 0.85, 0.3


def sparsest(
    basis: Tensor, start: Tensor, nonnegative: bool = False, near: float = START
) -> Tensor:
    """A vector v, near a start, for which ``basis @ v`` has many zeros.

    A local minimum of ``Σ_j log((Mv)_j² + e²)`` on the unit sphere as e falls (iteratively
    reweighted least squares with p = 0, Chartrand and Yin 2008): in each round v is the smallest
    eigenvector of ``Mᵀ diag(1 / ((Mv)² + e²)) M``, by two inverse iterations.

    Args:
        basis: M (m, b), columns orthonormal.
        start: (b,).
        nonnegative: entries below zero count like zeros that are missed.
        near: the first e, relative to the start's largest entry. Small ones stay near the start.

    Returns:
        v (b,) of length 1.
    """
    vector = start / start.norm()
    values = basis @ vector
    width = near * float(values.abs().max())
    identity = torch.eye(len(vector), dtype=basis.dtype, device=basis.device)
    for _ in range(ROUNDS):
        weights = 1 / (values.square() + width**2)
        if nonnegative:
            if values.sum() < 0:
                vector, values = -vector, -values
            weights = weights.where(values >= 0, 1 / width**2)
        matrix = basis.T @ (basis * weights[:, None])
        # Far below the smallest eigenvalue that rounding leaves, and no pivot is ever zero.
        matrix += 1e-13 * matrix.diagonal().sum() * identity
        factor = torch.linalg.cholesky(matrix)
        for _ in range(2):
            vector = torch.cholesky_solve(vector[:, None], factor)[:, 0]
            vector = vector / vector.norm()
        values = basis @ vector
        width *= DECAY
    return vector


PROGRAMS, SLACK = 4, 1e-2
"""Linear programs of a start, and what counts as near zero, relative to the mean entry."""


def extreme_ray(basis: Tensor, start: Tensor) -> Tensor | None:
    """A nonnegative vector ``basis @ v``, near a start, with many zeros.

    A vertex of ``{v : Mv ≥ 0, Σ Mv = 1}`` of least ``Σ_j w_j (Mv)_j``, and again with weights
    ``w_j = 1 / ((Mv)_j + e)`` of the one before (reweighted ℓ₁, Candès, Wakin and Boyd 2008), from
    which :func:`sparsest` ends. A sample's ReLU outputs are an extreme ray of that cone. A program
    has no local minima, and its rays are near the start: gradients of units, mixtures of the few
    samples that activate them, lead to many different ones. The cost grows as m b: 0.05 s at
    400 × 32, 1.4 s at 4,096 × 64.

    Args:
        basis: M (m, b), columns orthonormal.
        start: (b,).

    Returns:
        v (b,), or ``None`` where no such vector is found.
    """
    from scipy.optimize import linprog  # takes most of a second to import

    matrix = basis.numpy(force=True)
    values = matrix @ start.numpy(force=True)
    values = values if values.sum() > 0 else -values
    slack = np.full(len(matrix), SLACK / len(matrix))
    for _ in range(PROGRAMS):
        weights = 1 / (values.clip(0) + SLACK * np.abs(values).mean())
        solved = linprog(
            matrix.T @ weights, -matrix, slack, matrix.sum(0)[None], [1.0], (None, None)
        )
        if solved.x is None:
            return None
        values = matrix @ solved.x
    # A vertex is as exact as its entries at zero are. There are more, without the slack.
    return sparsest(basis, torch.from_numpy(solved.x).to(basis), nonnegative=True, near=SLACK)


def zero_entries(values: Tensor, at_least: int, contrast: float = 10.0) -> Tensor | None:
    """Which entries are zeros, up to noise of a size that is not known.

    The sorted magnitudes are split where two Gaussians of mean zero, one for each part, explain
    them best: k entries of root mean square σ₀ below and m − k of σ₁ above have least
    ``k log σ₀ + (m − k) log σ₁`` (minimum error thresholding, Kittler and Illingworth 1986). A gap
    between them is not needed: some nonzero entries are always as small as noise is.

    Args:
        values: (m,).
        at_least: so many zeros there must be.
        contrast: the least σ₁ / σ₀.

    Returns:
        (m,) booleans, or ``None`` where the two do not differ that much.
    """
    if at_least >= len(values):
        return None
    ordered, order = values.abs().sort()
    squares = ordered.clamp_min(1e-9 * float(ordered[-1]) + 1e-300).square()
    below = torch.arange(1, len(values)).to(squares)
    above = len(values) - below
    low = squares.cumsum(0)[:-1] / below
    high = squares.flip(0).cumsum(0).flip(0)[1:] / above
    cost = (below * low.log() + above * high.log())[at_least - 1 :]
    count = at_least + int(cost.argmin())
    if float(high[count - 1]) < contrast**2 * float(low[count - 1]):
        return None
    zeros = torch.zeros_like(values, dtype=torch.bool)
    zeros[order[:count]] = True
    return zeros


def null_vector(matrix: Tensor) -> tuple[Tensor, float]:
    """The unit vector v of least ``‖Mv‖``, and the ratio of the two least singular values."""
    _, singular, right = torch.linalg.svd(matrix, full_matrices=matrix.shape[0] < matrix.shape[1])
    if matrix.shape[0] < matrix.shape[1] - 1:
        return right[-1], 1.0
    if matrix.shape[0] == matrix.shape[1] - 1:
        return right[-1], 0.0
    if len(singular) == 1:
        return right[-1], 0.0
    return right[-1], float(singular[-1] / singular[-2].clamp_min(1e-300))
