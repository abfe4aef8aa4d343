"""Find the mask of a network's last ReLU if features are pooled before the last layer.

The mask says which units of the ReLU are on. The last convolution must have a 3×3 kernel, padding 1
and stride 1. Its weight gradient is a product ``B A``. Column p of B is the mask at position p,
times known derivatives of the loss. Row p of A is the patch of the convolution's input at p. The
product gives the space that the columns of B span, up to rounding, and the masks are the binary
vectors in it. The overlap of the patches shows to which position each mask belongs.
"""

import math

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.network.calls import Geometry, Pair

LAST_GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
"""The geometry that the last convolution must have: its overlapping patches reveal their places."""

SLACK = 1e-5
"""Largest difference of an entry of a mask, times the entry's scale, from a vector of the subspace
that a gradient gives for such masks. It is in units of the median scale, and allows for the
rounding of a pass in single precision."""


def averaged_mask(error: Tensor, gradient: Tensor) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before global average pooling of a square map.

    It is 1 where a unit is on, else 0. ``error`` (1, N, H, W) is the derivative of the loss at the
    outputs of the last convolution, as if every unit of the ReLU were on. ``gradient`` (N, C, 3, 3)
    is that of the convolution's weight.

    Raises:
        ValueError: the derivatives differ between positions, or the masks are not found.
    """
    shared = shared_error(error)
    product = gradient.flatten(1) / shared[:, None]
    channels, positions = len(shared), error[0, 0].numel()
    if positions >= channels:
        raise ValueError(
            f"the gradient of the last convolution cannot determine {positions} masks, one for "
            f"each position, as they span all of its {channels} channels."
        )
    columns = binary_columns(product, positions)
    patches = torch.linalg.lstsq(columns, product).solution
    order = arrange(patches.reshape(positions, *gradient.shape[1:]))
    return columns[:, order].reshape(error.shape)


def shared_error(error: Tensor) -> Tensor:
    """Return each channel's value (N,) of errors (1, N, H, W) that are equal at all positions.

    An error is the derivative of the loss by a convolution's output.

    Raises:
        ValueError: the errors differ between positions.
    """
    shared = error.flatten(2)[0, :, 0]
    if not torch.allclose(error.flatten(2)[0], shared[:, None].expand(-1, error[0, 0].numel())):
        raise ValueError(
            "features must be averaged over positions before the last layer, or be the maxima of "
            "windows that do not overlap."
        )
    return shared


def maxima_mask(
    error: Tensor,
    gradient: Tensor,
    active: Tensor,
    window: Pair,
) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before max pooling with flattened outputs.

    It is 1 where an entry is positive and the maximum of its window, else 0. ``error`` (1, N, H, W)
    is the derivative of the loss at the outputs of the last convolution, as if every entry were its
    window's maximum, and ``gradient`` (N, C, 3, 3) that of the convolution's weight. ``active`` (N
    · windows,) is true where the pooled outputs are positive. A window is (height, width); together
    the windows cover a square.

    Raises:
        ValueError: the derivatives differ within windows, the pooled outputs are not those that the
            last layer takes in, or the masks are not found.
    """
    channels, height, width = error.shape[1:]
    grid = (height // window[0], width // window[1])
    covered = (grid[0] * window[0], grid[1] * window[1])
    if len(active) != channels * grid[0] * grid[1]:
        raise ValueError("the maxima of the last pooling must be what the last layer takes in.")
    blocks = F.unfold(error[0, :, None, : covered[0], : covered[1]], window, stride=window)
    shared = blocks[:, 0]
    if not torch.allclose(blocks, shared[:, None].expand_as(blocks)):
        raise ValueError("errors must be shared within each window of the last pooling.")
    shared = shared * active.reshape(shared.shape)
    count, size = covered[0] * covered[1], window[0] * window[1]
    basis = _span(gradient.flatten(1), count)
    each = [disjoint_columns(basis, scales, size) * scales[:, None] for scales in shared.T]
    columns = torch.cat(each, 1)
    patches = torch.linalg.lstsq(columns, gradient.flatten(1)).solution
    order = arrange(patches.reshape(count, *gradient.shape[1:]))
    mask = (columns[:, order] != 0).to(error.dtype).reshape(1, channels, *covered)
    return F.pad(mask, (0, width - covered[1], 0, height - covered[0]))


def binary_columns(product: Tensor, count: int) -> Tensor:
    """Return the columns of a binary matrix B (N, P), in any order, given a product ``B A``.

    The P leading left singular vectors of the product span the columns of B. P entries determine a
    vector of that space, so all 2^P binary choices of these entries are tried. A choice is kept if
    the whole vector is binary. The product has the shape (N, Q), and P, ``count``, is at most 20.

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
    basis = _span(product, count)
    remaining, pivots = basis.clone(), []
    for _ in range(count):
        pivots.append(int(remaining.square().sum(1).argmax()))
        direction = remaining[pivots[-1]] / remaining[pivots[-1]].norm()
        remaining = remaining - (remaining @ direction)[:, None] * direction
    to_all = basis @ torch.linalg.inv(basis[pivots])
    # Most choices of bits give vectors with a wrong entry among the first few, tested first.
    bits = torch.arange(1, 2**count)
    for rows in (to_all[: 4 * count], to_all):
        patterns = (bits[:, None] >> torch.arange(count)) & 1
        entries = patterns.to(product.dtype) @ rows.T
        bits = bits[((entries - entries.round().clamp(0, 1)).abs() <= 0.05).all(1)]
    if len(bits) != count:
        raise ValueError(f"{count} masks were expected, {len(bits)} binary vectors were found.")
    patterns = (bits[:, None] >> torch.arange(count)) & 1
    return (patterns.to(product.dtype) @ to_all.T).round().T


def _span(matrix: Tensor, rank: int) -> Tensor:
    """Return orthonormal columns (N, rank) that span the columns of a matrix of this rank."""
    left, singular, _ = torch.linalg.svd(matrix, full_matrices=False)
    if len(singular) < rank or singular[rank - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {rank}.")
    return left[:, :rank]


def disjoint_columns(basis: Tensor, scales: Tensor, count: int) -> Tensor:
    """Return binary columns (N, count) that share no row and, with scaled rows, lie in a subspace.

    Each row has a 1 in one column only, so that the columns have few entries, as few nonnegative
    vectors of the subspace have. So a linear program finds a column from any of its rows: among the
    nonnegative vectors of the subspace with a 1 in that row, the column has the least sum (Donoho
    and Tanner 2005, PNAS 102, the nonnegative case). This is repeated for rows that are in no
    column yet. Rows whose scale is below 100 times ``SLACK`` take no part in the search, and join
    the column that fits them best.

    ``basis`` (N, R) has orthonormal columns that span the subspace. A column times the ``scales``
    (N,) lies in it. The columns come in any order. A row whose scale is zero has no 1.

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
    sure = size > 100 * SLACK
    used = sure | (size == 0)
    rows = basis * torch.where(scales < 0, -1.0, 1.0).to(basis.dtype)[:, None]
    inverse = torch.linalg.pinv(rows[used])
    columns: list[Tensor] = []
    remaining = sure.clone()
    while len(columns) < count:
        for row in size.where(remaining, -1.0).argsort(descending=True)[: int(remaining.sum())]:
            chosen = _sparsest(rows, size, used, remaining, int(row))
            column = rows @ (inverse @ (chosen * size)[used])
            # The linear program has some slack, so that its binary vector may lie outside the
            # subspace.
            if chosen.any() and (column - chosen * size)[used].abs().max() <= SLACK:
                break
        else:
            raise ValueError(f"{count} masks were sought, {len(columns)} found.")
        columns.append(column)
        remaining = remaining & ~chosen
    if remaining.any():
        raise ValueError(f"{count} masks leave {int(remaining.sum())} rows without one.")
    nearest = torch.stack(columns, 1).argmax(1)
    return F.one_hot(nearest, count).to(basis.dtype) * (size > 0)[:, None]


def _sparsest(rows: Tensor, size: Tensor, used: Tensor, remaining: Tensor, row: int) -> Tensor:
    """Return which rows (N,) belong to the nonnegative vector of least sum with a 1 in a given row.

    All are false if the linear program fails. The vector times ``size`` (N,) ≥ 0, the rows'
    factors, lies in the span of the columns of ``rows`` (N, R). The program constrains the rows
    that are true in ``used`` (N,), and only those in ``remaining`` (N,) may belong to the vector.
    """
    upper = size.where(remaining, 0.0) + SLACK
    lower = torch.full_like(size, -SLACK)
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
    """Return the order (P,) in which the 3×3 patches of a square map lie in it, row by row.

    The order consists of the patches' indices. ``patches`` (P, C, 3, 3) holds all patches that a
    convolution of padding 1 and stride 1 takes from the map. Neighbouring patches overlap. The
    centre of a patch's right neighbour equals the patch's middle right entry, and the neighbour
    below is found likewise. The patch at the upper left corner has the padding's zeros above and on
    the left.

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
