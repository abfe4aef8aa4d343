"""The features that one or more convolutions take in, solved from the convolutions' gradients.

Their weight gradients state ``M(δ) a = T`` about the features a
(:mod:`flwr_leakage.attacks.exact.weight_equations`). Let V be the eigenvectors and λ the
eigenvalues of ``MᵀM``. The least-squares solution is ``a = V λ⁻¹ Vᵀ Mᵀ T``. What it leaves of the
equations measures their noise, whatever its source: float32 arithmetic, the rounding of parameters
on the wire, or noise that the client added. With residuals ``r = T − M a`` of n equations for each
of C input channels, and rank k,

    σ² = ‖r‖² / (C (n − k)),    Var a[p] = σ² (V λ⁻¹ Vᵀ)[p, p].

Are the equations of one output channel o at odds with the others? A system with hardly more
equations than unknowns bends to any of them. So not r is compared, but by how much ``‖r‖²`` falls
if o is left out (Cook and Weisberg 1982, section 2.2), for each of the f equations of o that the
others check. With the block H_oo of ``H = M V λ⁻¹ Vᵀ Mᵀ``,

    s_o² = r_oᵀ (1 − H_oo)⁻¹ r_o / (C f),

whose mean is σ² if there is noise alone. For a channel that was left out already, 1 + H_oo stands
in place of 1 − H_oo: the others' noise adds to its own. Where s_o does not stand out of its median,
as the others bent too, the channel with the greatest ratio of s_o² to the σ² that is left without
it is looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.relu_walk import Use
from flwr_leakage.attacks.exact.weight_equations import Whitened, weight_equations

CHECKED = 1e-4
"""The least ``1 − h`` of an equation that others check.

Where they say nothing of it, float64 leaves ``λ`` times its own rounding: 1e-6 and less.
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
        limits: the norm that the residual of each of these has at most if it does not.
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
        contradiction: a channel contradicts a solution if s_o is above this multiple of the median,
            and so is its share of the channel's gradient. Rounding grows with the gradient, but
            less: great gradients have great residuals, and small ones great shares. Or if s_o is
            above this multiple of the σ that is left without the channel. With less than twice as
            many equations as unknowns only the latter counts, one channel at a time.

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
    for last in reversed(range(trims)):
        rows = kept.repeat_interleave(sizes)
        equations = _whiten(matrix[rows], target[rows], rank_tolerance)
        residual = (matrix @ (equations.rows.T @ equations.values) - target)[rows]
        lost, remaining = float(residual.square().sum()), len(residual) - equations.num_equations
        checks = [
            _check(m, t, equations, k) for (m, t), k in zip(pairs, kept.split(counts), strict=True)
        ]
        free, falls = (torch.cat(list(values)) for values in zip(*checks, strict=True))
        size = (falls / (channels * free.clamp_min(1))).sqrt()
        limit = _typical(size, scale, kept) * contradiction
        # One wrong channel bends the solution of hardly more equations than unknowns to itself, and
        # the others seem to contradict it. By the fall of ‖r‖² it stands out even then.
        is_redundant = len(residual) >= 2 * height * width
        agrees = size <= limit if is_redundant else kept.clone()
        if bool((agrees == kept).all()):
            rest = (lost - falls).clamp_min(0) / (channels * (remaining - free).clamp_min(1))
            ratio = torch.where(kept & (size > 0), size.square() / rest.clamp_min(1e-300), 0.0)
            worst = int(ratio.argmax())
            agrees[worst] &= bool(ratio[worst] <= contradiction**2)
        if not last or bool((agrees == kept).all()):
            break
        kept = agrees
    sigma = (lost / (channels * remaining)) ** 0.5 if remaining else torch.nan
    spread = (equations.rows / equations.singular[:, None]).square().sum(0).sqrt()
    left_out = (~kept).nonzero()[:, 0].tolist()
    return Solved(
        (equations.rows.T @ equations.values).T.reshape(1, channels, height, width),
        (sigma * spread).reshape(1, 1, height, width),
        equations,
        tuple(names[i] for i in left_out),
        tuple(float(limit[i] * (channels * 2 * sizes[i]) ** 0.5) for i in left_out),
    )


def _typical(size: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """What s_o is typically for a gradient of norm ``scale`` (O,): infinite if none is checked.

    It is the median over the channels that are kept, or their median share of the gradient's norm
    times its own norm, whichever is greater.
    """
    compared = kept & (size > 0)
    if not bool(compared.any()):
        return torch.full_like(size, torch.inf)
    share = (size / scale.clamp_min(1e-300))[compared].median()
    return torch.maximum(size[compared].median(), share * scale)


def _check(
    matrix: Tensor, target: Tensor, equations: Whitened, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """How the equations M (O, K, P), T (O, K, C) of one convolution meet those of all.

    Args:
        matrix: M.
        target: T.
        equations: of all channels that are kept.
        kept: (O,), which of these channels are.

    Returns:
        (O,) how many equations of each channel others check, and by how much ‖r‖² falls without it.
    """
    residual = target - matrix @ (equations.rows.T @ equations.values)
    whitened = matrix @ (equations.rows.T / equations.singular)
    sign = torch.where(kept, -1.0, 1.0).to(matrix.dtype)[:, None, None]
    unit = torch.eye(matrix.shape[1], dtype=matrix.dtype)
    squares, vectors = torch.linalg.eigh(unit + sign * (whitened @ whitened.mT))
    is_checked = squares > CHECKED
    parts = (vectors.mT @ residual).square().sum(2) / squares.clamp_min(CHECKED)
    return is_checked.sum(1), torch.where(is_checked, parts, 0.0).sum(1)


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
