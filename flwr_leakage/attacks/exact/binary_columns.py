"""Binary columns of a matrix product, and the order of overlapping patches.

The weight gradient of a last convolution for one sample is a sum over positions p. The summand of
a position is an error times a mask times the patch that the convolution took in there. So the
gradient is a product ``B A``: the columns of B are the masks, times known errors, and the rows of A
are the patches. Its column space is known to rounding. The masks are the binary vectors in it.
"""

import math

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor
from torch.nn import functional as F


def binary_columns(product: Tensor, count: int, tolerance: float = 0.05) -> Tensor:
    """Return the columns of a binary B (N, P) from ``B A`` (N, Q), in any order.

    The P leading left singular vectors span the column space. P entries determine a vector of
    that space, so all 2^P binary choices of these entries are tried. A choice is kept if the whole
    vector is binary.

    Args:
        product: ``B A`` (N, Q).
        count: the number of columns P, at most 20.
        tolerance: how far the entries of a vector may be from 0 or 1.

    Raises:
        ValueError: the rank of ``B A`` is below P, or the space does not hold exactly P binary
            vectors besides zero.

    Example:
        >>> masks = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).double()
        >>> binary_columns(masks @ torch.tensor([[1.0, 2.0], [3.0, -1.0]]).double(), 2).sum(0)
        tensor([2., 2.], dtype=torch.float64)
    """
    if count > 20:
        raise ValueError(f"at most 20 columns can be enumerated, got {count}.")
    left, singular, _ = torch.linalg.svd(product, full_matrices=False)
    if len(singular) < count or singular[count - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {count}.")
    basis = left[:, :count]
    remaining, pivots = basis.clone(), []
    for _ in range(count):
        pivots.append(int(remaining.square().sum(1).argmax()))
        direction = remaining[pivots[-1]] / remaining[pivots[-1]].norm()
        remaining = remaining - (remaining @ direction)[:, None] * direction
    to_all = basis @ torch.linalg.inv(basis[pivots])
    # Most choices fail at the first few entries already: test these first.
    bits = torch.arange(1, 2**count)
    for rows in (to_all[: 4 * count], to_all):
        patterns = (bits[:, None] >> torch.arange(count)) & 1
        entries = patterns.to(product.dtype) @ rows.T
        bits = bits[((entries - entries.round().clamp(0, 1)).abs() <= tolerance).all(1)]
    if len(bits) != count:
        raise ValueError(f"{count} masks were expected, {len(bits)} binary vectors were found.")
    patterns = (bits[:, None] >> torch.arange(count)) & 1
    return (patterns.to(product.dtype) @ to_all.T).round().T


def disjoint_columns(basis: Tensor, scales: Tensor, count: int, tolerance: float = 1e-5) -> Tensor:
    """Return binary columns that share no row, and that lie in a subspace if scaled row by row.

    Each row belongs to one of the columns, so that the columns are sparse. Few nonnegative vectors
    of a subspace are sparse. So a linear program finds a column from any of its rows: among the
    nonnegative vectors that are 1 in that row, the column has the least sum (Donoho and Tanner
    2005, PNAS 102, the nonnegative case). This is repeated for rows that are in no column yet.

    Args:
        basis: (N, R), orthonormal columns that span the subspace.
        scales: (N,) factors of the rows; a column is zero in rows whose scale is zero.
        count: the number of columns.
        tolerance: the largest distance of a column's entry from the subspace, in units of the
            scales' median. Rows whose scale is below 100 times this value take no part in the
            search, and join the column that suits them best.

    Returns:
        (N, count), the columns in any order. A row has one 1, or none if its scale is zero.

    Raises:
        ValueError: no row has a scale, or the columns are not found.

    Example:
        >>> columns = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [0, 1]]).double()
        >>> basis = torch.linalg.qr(columns)[0]
        >>> disjoint_columns(basis, torch.ones(5).double(), 2).sum(0).sort().values
        tensor([2., 3.], dtype=torch.float64)
    """
    if not bool(scales.any()):
        raise ValueError("no row has a scale.")
    size = scales.abs() / scales[scales != 0].abs().median()
    sure = size > 100 * tolerance
    used = sure | (size == 0)
    rows = basis * torch.where(scales < 0, -1.0, 1.0).to(basis.dtype)[:, None]
    inverse = torch.linalg.pinv(rows[used])
    columns: list[Tensor] = []
    remaining = sure.clone()
    while len(columns) < count:
        for row in size.where(remaining, -1.0).argsort(descending=True)[: int(remaining.sum())]:
            chosen = _sparsest(rows, size, used, remaining, int(row), tolerance)
            column = rows @ (inverse @ (chosen * size)[used])
            # The program allows some slack, so that a binary vector may lie outside the subspace.
            if chosen.any() and (column - chosen * size)[used].abs().max() <= tolerance:
                break
        else:
            raise ValueError(f"{count} masks were sought, {len(columns)} found.")
        columns.append(column)
        remaining = remaining & ~chosen
    if remaining.any():
        raise ValueError(f"{count} masks leave {int(remaining.sum())} rows without one.")
    nearest = torch.stack(columns, 1).argmax(1)
    return F.one_hot(nearest, count).to(basis.dtype) * (size > 0)[:, None]


def _sparsest(
    rows: Tensor, size: Tensor, used: Tensor, remaining: Tensor, row: int, tolerance: float
) -> Tensor:
    """Return booleans (N,): rows of the least-sum nonnegative vector that is 1 in ``row``.

    All are false if the linear program fails.
    """
    upper = size.where(remaining, 0.0) + tolerance
    lower = torch.full_like(size, -tolerance)
    lower[row] = size[row]
    cost = (rows[remaining] / size[remaining, None]).sum(0)
    limits = LinearConstraint(rows[used].numpy(), lower[used].numpy(), upper[used].numpy())
    # The presolve of HiGHS calls some feasible programs infeasible, and saves no time here.
    found = milp(
        cost.numpy(),
        constraints=limits,
        bounds=Bounds(-np.inf, np.inf),
        options={"presolve": False},
    )
    if found.x is None:
        return torch.zeros_like(remaining)
    return remaining & (rows @ torch.from_numpy(found.x) > size / 2)


def arrange(patches: Tensor) -> Tensor:
    """Return the order of a square map's 3×3 patches, row by row.

    Neighbouring patches overlap. The centre of a patch's right neighbour equals the patch's right
    entry, and the neighbour below is found likewise. The patch at the upper left corner has zeros
    above and on the left, from the padding.

    Args:
        patches: (P, C, 3, 3), all patches that a convolution of padding 1 and stride 1 takes from
            a square map, in any order.

    Returns:
        (P,) the patches' indices in the order of the map's positions, row by row.

    Raises:
        ValueError: P is no square number, or the neighbours contradict each other.
    """
    side = math.isqrt(len(patches))
    centres = patches[:, :, 1, 1]
    right, below = (
        torch.cdist(entry, centres).argmin(1).tolist()
        for entry in (patches[:, :, 1, 2], patches[:, :, 2, 1])
    )
    corner = patches[:, :, 0, :].square().sum((1, 2)) + patches[:, :, :, 0].square().sum((1, 2))
    order: list[int] = []
    first = int(corner.argmin())
    for _ in range(side):
        row = first
        for _ in range(side):
            order.append(row)
            row = right[row]
        first = below[first]
    if side * side != len(patches) or sorted(order) != list(range(len(patches))):
        raise ValueError("the patches do not fit together to a square map.")
    return torch.tensor(order)
