"""The features that one or more convolutions take in, solved from the convolutions' gradients.

Their weight gradients state ``M(δ) a = T`` about the features a
(:mod:`flwr_leakage.attacks.exact.weight_equations`). M has the eigenvectors V and eigenvalues λ of
``MᵀM``, and the least-squares solution is ``a = V λ⁻¹ Vᵀ Mᵀ T``. What it leaves of the equations
measures their noise, whatever its source: float32 arithmetic, the rounding of parameters on the
wire, or noise that the client added. With residuals ``r = T − M a`` in n equations for each of C
input channels, and rank k,

    σ² = ‖r‖² / (C (n − k)),    Var a[p] = σ² (V λ⁻¹ Vᵀ)[p, p].

The equations of one output channel o keep ``f_o = Σ (1 − h)`` of their degrees of freedom, with the
leverages h, the diagonal of ``M V λ⁻¹ Vᵀ Mᵀ``. A system with hardly more equations than unknowns
bends to them, so that residuals are compared by ``‖r_o‖ / √(C f_o)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.relu_walk import Use
from flwr_leakage.attacks.exact.weight_equations import Whitened, weight_equations

CHECKED = 1e-3
"""The least share of its degrees of freedom that a checked channel keeps.

Rounding leaves about 1e-6 of them where other equations say nothing: far less.
"""


@dataclass(frozen=True)
class Solved:
    """What weight gradients tell of the features that their convolutions take in.

    Attributes:
        values: the least-squares solution (1, C, H, W), the shortest where there are many.
        noise: (1, 1, H, W), the standard deviation of its error; NaN where no equation checks the
            others.
        equations: the directions of the features that are determined.
        contradicted: (convolution, output channel) of those left out, as they contradict the rest.
        limits: the greatest norm of each one's residual at which it would not.
    """

    values: Tensor
    noise: Tensor
    equations: Whitened
    contradicted: tuple[tuple[int, int], ...]
    limits: tuple[float, ...]

    @property
    def is_checked(self) -> bool:
        """Whether some equations check the others, so that their noise is known."""
        return bool(self.noise.isfinite().all())


def solve_features(
    uses: Sequence[Use],
    errors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rank_tolerance: float,
    trims: int = 3,
    contradiction: float = 5.0,
) -> Solved:
    """The features (1, C, H, W) that one or more convolutions take in, from their weight gradients.

    This is a least-squares solution over the equations of all output channels. Where a ReLU's mask
    has a wrong entry, so has the error of its channel, and the channel's equations contradict all
    others. Such channels are left out, and the rest is solved again.

    Args:
        uses: the convolutions, at least one.
        errors: ∂L/∂outputs of each, (1, O, H', W').
        gradients: ∂L/∂W of each.
        rank_tolerance: directions whose singular value is below this share of the largest are not
            determined.
        trims: how often they are solved; after each solution, contradicting channels are left out.
        contradiction: a channel contradicts a solution if its residual is above this multiple of
            the median residual, and so is its share of the channel's gradient. Rounding is in
            proportion to the gradient in part: channels of great gradients have great residuals,
            and those of small ones great shares.

    Raises:
        ValueError: all errors are zero.
    """
    channels, height, width = uses[0].input_shape
    matrices: list[Tensor] = []
    targets: list[Tensor] = []
    names: list[tuple[int, int]] = []
    for i, (use, error, gradient) in enumerate(zip(uses, errors, gradients, strict=True)):
        matrix, right = weight_equations(error, gradient, use.input_shape, use.geometry)
        matrices += list(matrix)
        targets += list(right)
        names += [(i, channel) for channel in range(len(matrix))]
    sizes = torch.tensor([len(m) for m in matrices])
    owner = torch.arange(len(matrices)).repeat_interleave(sizes)
    matrix, target = torch.cat(matrices), torch.cat(targets)
    scale = _by_owner(target.square().sum(1), owner).sqrt()
    kept = torch.ones(len(sizes), dtype=torch.bool)
    for last in range(trims):
        rows = kept[owner]
        equations = _whiten(matrix[rows], target[rows], rank_tolerance)
        solution = equations.rows.T @ equations.values
        residuals = _by_owner((matrix @ solution - target).square().sum(1), owner)
        whitened = matrix @ (equations.rows.T / equations.singular)
        leverage = _by_owner(whitened.square().sum(1), owner)
        # A channel that was left out is predicted: the prediction's error adds to its own.
        free = torch.where(kept, sizes - leverage, sizes + leverage).clamp_min(0)
        is_checked = free > CHECKED * sizes
        units = (channels * free).clamp_min(1e-300).sqrt()
        norms = residuals.sqrt()
        compared = is_checked & kept & (norms > 0)
        if not bool(compared.any()):
            limit = torch.full_like(norms, torch.inf)
            break
        typical = (norms / units)[compared].median()
        share = (norms / units / scale.clamp_min(1e-300))[compared].median()
        limit = contradiction * units * torch.maximum(typical, share * scale)
        agrees = ~is_checked | (norms <= limit)
        if last == trims - 1 or bool((agrees == kept).all()):
            break
        kept = agrees
    remaining = float(free[kept & is_checked].sum())
    lost = float(residuals[kept & is_checked].sum())
    sigma = (lost / (channels * remaining)) ** 0.5 if remaining else torch.nan
    spread = (equations.rows / equations.singular[:, None]).square().sum(0).sqrt()
    left_out = (~kept).nonzero()[:, 0].tolist()
    return Solved(
        solution.T.reshape(1, channels, height, width),
        (sigma * spread).reshape(1, 1, height, width),
        equations,
        tuple(names[i] for i in left_out),
        tuple(float(limit[i]) for i in left_out),
    )


def _by_owner(values: Tensor, owner: Tensor) -> Tensor:
    """Sums of the values of each owner."""
    return values.new_zeros(int(owner[-1]) + 1).index_add(0, owner, values)


def _whiten(matrix: Tensor, target: Tensor, rank_tolerance: float) -> Whitened:
    """``V a = S⁻¹ Uᵀ T`` by the eigenvectors of MᵀM, refined once.

    Its eigenvalues are the squared singular values. So those of 1e-5 of the largest have six exact
    digits in float64, and the refinement makes up for the rest.
    """
    squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
    determined = squares > max(rank_tolerance**2 * float(squares[-1]), 0.0)
    if not bool(determined.any()):
        raise ValueError("the errors are zero, and determine no features.")
    squares, rows = squares[determined], vectors[:, determined].T
    values = torch.zeros(len(rows), target.shape[1], dtype=target.dtype)
    for _ in range(2):
        residual = target - matrix @ (rows.T @ values)
        values = values + rows @ (matrix.T @ residual) / squares[:, None]
    return Whitened(rows, values, squares.sqrt())
