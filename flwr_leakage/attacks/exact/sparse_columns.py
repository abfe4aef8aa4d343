"""Sparse vectors in the span of a few known ones.

The gradient of a linear layer is ``∂L/∂W = S H`` with S = ∂L/∂Z (m × B) and H (B × n) the
samples' inputs. If a ReLU follows the layer, a column of S is zero for every unit that the sample
leaves inactive. If the layer's inputs are outputs of a ReLU, or images with black pixels, the rows
of H have zeros too. The gradient gives the spans of both. A sample's own vector is sparser there
than any mixture of samples (SPEAR: Dimitrov et al. 2024; dictionary learning: SPEAR++ 2025).
"""

import torch
from torch import Tensor


def sparsest(
    basis: Tensor,
    start: Tensor,
    nonnegative: bool = False,
    near: float = 0.3,
    rounds: int = 60,
    decay: float = 0.85,
) -> Tensor:
    """Return a vector v, near a start, for which ``basis @ v`` has many zeros.

    It is a local minimum of ``Σ_j log((Mv)_j² + e²)`` on the unit sphere as e falls (iteratively
    reweighted least squares with p = 0, Chartrand and Yin 2008). In each round v is the smallest
    eigenvector of ``Mᵀ diag(1 / ((Mv)² + e²)) M``, from two inverse iterations.

    Args:
        basis: M (m, b), with orthonormal columns.
        start: (b,) the vector to start from, of any length.
        nonnegative: whether negative entries get the largest weight, like missed zeros.
        near: the first e, relative to the largest entry of M times the start's direction. A small
            value keeps v near the start.
        rounds: number of rounds.
        decay: factor of e from round to round (all defaults were chosen on development draws).

    Returns:
        v (b,) of length 1.
    """
    vector = start / start.norm()
    values = basis @ vector
    width = near * float(values.abs().max())
    identity = torch.eye(len(vector), dtype=basis.dtype, device=basis.device)
    for _ in range(rounds):
        weights = 1 / (values.square() + width**2)
        if nonnegative:
            if values.sum() < 0:
                vector, values = -vector, -values
            weights = weights.where(values >= 0, 1 / width**2)
        matrix = basis.T @ (basis * weights[:, None])
        # The ridge is far below the smallest eigenvalue, and keeps every pivot above zero.
        matrix += 1e-13 * matrix.diagonal().sum() * identity
        factor = torch.linalg.cholesky(matrix)
        for _ in range(2):
            vector = torch.cholesky_solve(vector[:, None], factor)[:, 0]
            vector = vector / vector.norm()
        values = basis @ vector
        width *= decay
    return vector


def zero_entries(values: Tensor, at_least: int, contrast: float = 10.0) -> Tensor | None:
    """Return which entries are zeros up to noise of unknown size, or None if none stand out.

    The sorted magnitudes are split where two Gaussians of mean zero, one for each part, explain
    them best. The k entries below the split have the root mean square σ₀, the m − k above it σ₁,
    and ``k log σ₀ + (m − k) log σ₁`` is least (minimum error thresholding, Kittler and Illingworth
    1986). This needs no gap between them: some nonzero entries are always as small as the noise.

    Args:
        values: (m,) the entries.
        at_least: least number of zeros.
        contrast: least ratio σ₁ / σ₀.

    Returns:
        (m,) booleans, true for zeros; ``None`` if the ratio is smaller or ``at_least`` ≥ m.
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
    """Return the unit vector v of least ``‖Mv‖``, and the ratio of the two least singular values.

    The ratio is near 0 if v is the only null vector, and 1 if a matrix of too few rows has several.
    """
    _, singular, right = torch.linalg.svd(matrix, full_matrices=matrix.shape[0] < matrix.shape[1])
    if matrix.shape[0] < matrix.shape[1] - 1:
        return right[-1], 1.0
    if matrix.shape[0] == matrix.shape[1] - 1:
        return right[-1], 0.0
    if len(singular) == 1:
        return right[-1], 0.0
    return right[-1], float(singular[-1] / singular[-2].clamp_min(1e-300))
