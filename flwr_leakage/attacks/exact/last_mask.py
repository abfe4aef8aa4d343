"""Find the mask of a network's last ReLU if its outputs are pooled before the last layer.

The mask says which units of the ReLU are on. The last convolution must have a 3×3 kernel, padding 1
and stride 1. Its weight gradient is a product ``B A``. Column p of B is the mask of all channels at
position p, times known derivatives of the loss. Row p of A is the patch of the convolution's input
at p. The product gives the space that the columns of B span, up to rounding. Divided by the
derivatives, the masks are the binary vectors in this space. The overlap of the patches shows to
which position each mask belongs.
"""

import math

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.network.calls import Geometry, Pair

LAST_GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
"""Kernel, dilation, padding and stride that the last convolution must have. Its patches overlap,
and so reveal their places."""

FAINT = 0.02
"""A channel takes no part in the search for masks behind BatchNorm in train mode if its error is
below this share of the median size of errors, as its error divides the rounding."""

BINARY = 1e-3
"""Largest root mean square distance between a mask and the affine space that holds it. Entries of
right masks were at most 3e-5 away on four ResNet-18 of width 16, 32 and 64 (seeds 13000 to 13004),
and no false vector was found."""

STARTS, BLOCKS, PROJECTIONS = 2000, 100, 60
"""Number of random binary vectors in a block of starts, and largest numbers of blocks and of
projections of each start. One to three blocks found all masks of a ResNet-18 of width 32 or 64, and
33 blocks those of width 16 (seeds 13000 to 13004)."""

SLACK = 1e-5
"""Largest distance between a mask, each entry times its channel's known derivative of the loss, and
the subspace in which the gradient shows that such vectors lie. It holds for each entry, in units of
the median derivative, and allows for the rounding of a pass in single precision. A larger value
lets wrong masks pass."""


def averaged_mask(error: Tensor, gradient: Tensor) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before global average pooling of a square map.

    It is 1 where a unit is on, else 0. ``error`` (1, N, H, W) is the derivative of the loss by the
    outputs of the last convolution, as if every unit of the ReLU were on. ``gradient`` (N, C, 3, 3)
    is the derivative by the convolution's weight.

    Raises:
        ValueError: the derivatives differ between positions, the positions are not fewer than the N
            channels, or the masks are not found.
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


def normalised_mask(
    error: Tensor, gradient: Tensor, weight: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before global average pooling of a square map,
    if BatchNorm in train mode stands between the last convolution and the ReLU.

    The mask is 1 where a unit is on, else 0. In channel c, the derivative of the loss by the
    convolution's output at position p is

        δ[c, p] = a[c] m[c, p] − b[c] − k[c] ⟨W[c], A_p⟩,

    with the mask m, the convolution's weight W, and the patch A_p of its input, less the mean
    patch. The weight gradient is ``T = δ A``. Its rank is P − 1 for P positions, as δ sums to zero.
    From its singular value decomposition ``T = U S Vᵀ`` follow ``A = Y Vᵀ`` and ``δ = U S G``. So
    each column of the mask lies in the affine space of all ``(U S g + b + k W V y)/a``, of
    dimension 2 (P − 1). If there are more channels than that, the columns are the binary vectors
    of this space.

    Args:
        error: a (1, N, H, W), equal at all positions.
        gradient: ∂L/∂W (N, C, 3, 3) of the convolution.
        weight: W (N, C, 3, 3).
        first: b (N, 1).
        second: k (N, 1).

    Raises:
        ValueError: the errors differ between positions, the channels are too few, or the masks are
            not found.
    """
    shared = shared_error(error)[:, None]
    channels, rank = len(shared), error[0, 0].numel() - 1
    if 2 * rank >= channels:
        raise ValueError(
            f"{channels} channels are too few for the masks of {rank + 1} positions, which need "
            f"more than {2 * rank}."
        )
    left, singular, right = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    if len(singular) < rank or singular[rank - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {rank}.")
    directions = right[:rank]
    outputs = second * (weight.flatten(1) @ directions.T)
    basis = torch.cat([left[:, :rank] * singular[:rank], outputs], 1) / shared
    offset = first / shared
    sure = (shared.abs() > FAINT * shared.abs().median())[:, 0]
    columns = affine_binary_columns(basis[sure], offset[sure, 0], rank + 1)
    inside = torch.linalg.lstsq(basis[sure], columns - offset[sure]).solution
    mask = (basis @ inside + offset > 0.5).to(error)
    centred = (inside[rank:].T @ directions).reshape(rank + 1, *gradient.shape[1:])
    return mask[:, arrange(uncentred(centred))].reshape(error.shape)


def affine_binary_columns(basis: Tensor, offset: Tensor, count: int) -> Tensor:
    """Return the P binary vectors, as columns (N, P), of an affine space ``basis q + offset``.

    Alternating projections find them: a random binary vector is projected onto the space, and
    rounded to the nearest binary vector, until it does not change (Gubin et al. 1967; the binary
    vectors are no convex set, so that most starts end beside the space). ``basis`` is (N, R) with
    R < N, ``offset`` (N,), and P is ``count``.

    Raises:
        ValueError: not exactly P binary vectors were found.

    Example:
        >>> basis = torch.tensor([[1.0], [1.0], [-1.0]]).double()
        >>> affine_binary_columns(basis, torch.tensor([0.0, 0.0, 1.0]).double(), 2).sum(0).tolist()
        [1.0, 2.0]
    """
    span = torch.linalg.qr(basis)[0]
    outside = (offset - span @ (span.T @ offset)).float()
    narrow, generator = span.float(), torch.Generator().manual_seed(0)
    found = basis.new_zeros(0, len(basis))
    for _ in range(BLOCKS):
        vectors = torch.rand(STARTS, len(basis), generator=generator).round()
        for _ in range(PROJECTIONS):
            near = vectors @ narrow @ narrow.T + outside
            rounded = (near > 0.5).float()
            stays = (rounded == vectors).all(1)
            is_near = (near - rounded).square().mean(1) < BINARY**2
            new = rounded[stays & is_near].to(found)
            found = torch.cat([found, new]).unique(dim=0)
            vectors = rounded[~stays]
            if not len(vectors):
                break
        if len(found) >= count:
            break
    if len(found) != count:
        raise ValueError(f"{count} masks were expected, {len(found)} binary vectors were found.")
    return found.T


def uncentred(patches: Tensor) -> Tensor:
    """Return the 3×3 patches (P, C, 3, 3) of a map with padding 1, from patches less their mean.

    At the eight outer entries of a patch, the padding's zeros of several positions give the same
    vector, which is minus the mean. The centre of a position equals the middle right entry of the
    position on its left, so that the differences of such entries show the mean of the centre.

    Raises:
        ValueError: no two vectors agree.
    """
    flat = patches.flatten(2)
    size = flat.square().mean().sqrt()
    found = flat.clone()
    for entry in (0, 1, 2, 3, 5, 6, 7, 8):
        found[:, :, entry] = flat[:, :, entry] - _commonest(flat[:, :, entry], size)
    pairs = found[:, None, :, 5] - flat[None, :, :, 4]
    found[:, :, 4] = flat[:, :, 4] + _commonest(pairs.flatten(0, 1), size)
    return found.reshape(patches.shape)


def _commonest(vectors: Tensor, size: Tensor) -> Tensor:
    """Return the vector (C,) to which most of given vectors (n, C) are equal, up to rounding."""
    near = torch.cdist(vectors, vectors) < 1e-2 * size * vectors.shape[1] ** 0.5
    counts = near.sum(1)
    if int(counts.max()) < 2:
        raise ValueError("the patches of the last convolution do not share the padding's zeros.")
    return vectors[near[int(counts.argmax())]].mean(0)


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
    is the derivative of the loss by the outputs of the last convolution, as if every entry were its
    window's maximum. ``gradient`` (N, C, 3, 3) is the derivative by the convolution's weight.
    ``active`` (N · windows,) is true where the pooled outputs are positive. ``window`` is the
    height and width of a window; together the windows cover a square.

    Raises:
        ValueError: the derivatives differ within windows, ``active`` has another number of entries
            than there are pooled outputs, or the masks are not found.
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
    """Return the P columns of a binary matrix B (N, P), in any order, given a product ``B A``.

    The P leading left singular vectors of the product span the columns of B. P entries determine a
    vector of that space, so all 2^P binary choices of these entries are tried. A choice is kept if
    the whole vector is binary within 0.05. The product has the shape (N, Q), and P is ``count``.

    Raises:
        ValueError: P exceeds 20, the rank of ``B A`` is below P, or the space does not hold exactly
            P binary vectors besides zero.

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
    # Most choices give vectors with an entry far from 0 and 1 among the first few, which are
    # therefore tested first.
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
    """Return orthonormal columns (N, rank) that span the columns of a matrix (N, Q) of this rank.

    Raises:
        ValueError: the rank is lower: too few singular values reach 1e-6 of the largest.
    """
    left, singular, _ = torch.linalg.svd(matrix, full_matrices=False)
    if len(singular) < rank or singular[rank - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {rank}.")
    return left[:, :rank]


def disjoint_columns(basis: Tensor, scales: Tensor, count: int) -> Tensor:
    """Return binary columns (N, count), at most one 1 per row, that lie in a subspace when scaled.

    ``scales`` (N,) holds a factor for each row. A column times these factors lies in the subspace
    that the orthonormal columns of ``basis`` (N, R) span. Where a factor is not zero, the row has a
    1 in one column; where it is zero, in none. The columns come in any order.

    The columns have few 1s, and few nonnegative vectors of the subspace are that sparse. So a
    linear program finds a column from any of its rows: among the nonnegative vectors of the
    subspace with a 1 in that row, the column has the least sum (Donoho and Tanner 2005, PNAS 102,
    the nonnegative case). The search goes on with rows that are in no column yet. Rows whose factor
    is below 100 ``SLACK`` times the median take no part in the search, and join the column that
    fits them best.

    Raises:
        ValueError: all factors are zero, or the columns are not found.

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
            # The linear program allows differences of up to ``SLACK``, so that its rounded solution
            # may lie outside the subspace. Such a solution is not taken.
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

    The result is true for the rows in which the vector is above 1/2; all are false if the linear
    program fails. The vector times the rows' factors ``size`` (N,) ≥ 0 lies in the span of the
    columns of ``rows`` (N, R). The program constrains the rows that are true in ``used`` (N,), and
    only those that are true in ``remaining`` (N,) may belong to the vector.
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
    """Return the indices (P,) of the 3×3 patches of a square map, in the map's order by rows.

    ``patches`` (P, C, 3, 3) holds all patches, in any order, that a convolution of padding 1 and
    stride 1 takes from the map. The centre of a patch's right neighbour equals the patch's middle
    right entry, and the centre of the neighbour below equals its lower middle entry. The patch at
    the upper left corner has the padding's zeros above and on the left.

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
