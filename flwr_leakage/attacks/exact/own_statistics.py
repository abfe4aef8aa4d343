"""Read features behind BatchNorm in train mode, by the statistics in the sent buffers.

With the statistics μ and σ known, BatchNorm in train mode propagates the error d of its outputs as

    δ = (γ d − m₁ − m₂ x̂) / σ,   m₁ = γ ∂L/∂β / N,   m₂ = γ ∂L/∂γ / N,   x̂ = (z − μ) / σ,

with N inputs z a channel (:func:`flwr_leakage.normalization.held_loss`). So the errors in front of
a layer depend on its own inputs through x̂ alone. The recursion of
:mod:`flwr_leakage.attacks.exact.recover_features` knows x̂ of all layers behind. A convolution
``z = W ∗ a`` in front of BatchNorm has the gradient ``Σ δ(a) ⊗ a``, which is quadratic in its input
a. As δ sums to zero over positions, it leaves a few directions of a open, such as the mean of every
second position that a stride of 2 takes; the mean μ of z tells them (:func:`completed`). It is
solved by repetition: x̂ of the last a gives δ, and the linear equations with this δ give the
next a. The share of x̂ in δ is about 1/√N, so that this contracts; :func:`fixed_point` speeds it up.

**The last mask.** Behind global average pooling all P positions share the error e. The last
convolution's gradient T (O, C·9) has the rank P − 1, as δ sums to zero over positions. With
``T = U S Vᵀ``, some ``δ = U g`` and patches less their mean ``A = Y Vᵀ``, the mask of a position is

    m_p = (U g_p + b + k ∘ W V y_p) / a ∈ {0, 1}^O,   a = γ e / σ,   b = m₁ / σ,   k = m₂ / σ².

This is an affine space of dimension 2 (P − 1), and its binary vectors are the masks. Alternating
projections from random vectors find them, one after another. y_p then gives the patch less the mean
patch. Padding is zero, so that the value which most border patches share outside of the map is the
mean's negative there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.feature_equations import Solved
from flwr_leakage.attacks.exact.last_mask import arrange, shared_error
from flwr_leakage.attacks.exact.relu_walk import Normalised, Use
from flwr_leakage.attacks.exact.weight_equations import Whitened

VECTORS, AT_ONCE, PROJECTIONS = 100_000, 10_000, 60
"""Largest number of random vectors, number of those that are projected at once, and of projections
of each. More vectors or projections only take longer, and more at once only memory."""

BINARY = 1e-3
"""Largest root mean square distance of a binary vector from the affine space. The value was chosen
on one development draw; no table."""

SAME_VECTOR = 1e-2
"""Share of the largest distance of vectors up to which two of them are equal. The value was chosen
on one development draw; no table."""


def fixed_point(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return x with ``step(x) = x``, by Anderson's acceleration of repetition (Anderson 1965).

    It ends after 40 steps, or once a step changes x by 1e-9 of its length. Six steps are combined.

    Args:
        step: the map.
        start: the first x, of any shape.

    Example:
        >>> round(float(fixed_point(torch.cos, torch.tensor([1.0]).double())), 6)
        0.739085
    """
    point, points, gaps = start, list[Tensor](), list[Tensor]()
    best, least = start, float("inf")
    for _ in range(40):
        found = step(point)
        gap = found - point
        size = float(gap.norm() / found.norm().clamp_min(1e-300))
        if size < least:
            best, least = found, size
        if size <= 1e-9:
            break
        points, gaps = [*points, found][-6:], [*gaps, gap][-6:]
        point = found
        if len(gaps) > 1:
            steps = torch.stack([gap - each for each in gaps[:-1]]).flatten(1)
            shares = torch.linalg.lstsq(steps.T, gap.flatten()[:, None]).solution[:, 0]
            for share, other in zip(shares, points[:-1], strict=True):
                point = point - share * (found - other)
    return best


def completed(
    solved: Solved, uses: Sequence[Use], weights: Sequence[Tensor], layers: Sequence[Normalised]
) -> Solved:
    """Return the same features with the directions that their gradients leave open, if few.

    Let n_j be these directions of a channel, and t_cj their unknown coordinates. Then the mean of
    ``W ∗ a`` over positions, which is μ, is linear in t.

    Args:
        solved: the features as the weight gradients determine them.
        uses: the convolutions that take them, each with BatchNorm behind it.
        weights: W of each.
        layers: the BatchNorm behind each.
    """
    whitened, shape = solved.equations, solved.values.shape
    count, channels = whitened.num_positions - whitened.num_equations, shape[1]
    if not count or count * channels > sum(len(weight) for weight in weights):
        return solved
    like = whitened.rows
    probes = torch.randn(
        whitened.num_positions, count, generator=torch.Generator().manual_seed(0), dtype=like.dtype
    )
    for _ in range(2):
        probes = torch.linalg.qr(probes - like.T @ (like @ probes))[0]
    maps = probes.T.reshape(count, 1, *shape[2:])
    rows, missing = [], []
    for use, weight, layer in zip(uses, weights, layers, strict=True):
        assert layer.op.mean is not None
        means = use.geometry.patches(maps).mean(2)
        row = torch.einsum("ock,jk->ocj", weight.flatten(2), means).flatten(1)
        own = weight.flatten(1) @ use.geometry.patches(solved.values)[0].mean(1)
        rows.append(row / layer.deviation[:, None])
        missing.append((layer.op.mean - own) / layer.deviation)
    found = torch.linalg.lstsq(torch.cat(rows), torch.cat(missing)[:, None]).solution
    found = found.reshape(channels, count)
    whole = Whitened(
        torch.cat([whitened.rows, probes.T]),
        torch.cat([whitened.values, found.T]),
        torch.cat([whitened.singular, whitened.singular.min().expand(count)]),
    )
    values = solved.values + (found @ probes.T).reshape(shape)
    return replace(solved, values=values, equations=whole)


def normalised_mask(
    layer: Normalised, error: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mask of the last ReLU before global average pooling of a square map, and x̂.

    Both are (1, O, H, W).

    Args:
        layer: the BatchNorm between the last convolution and this ReLU.
        error: (1, O, H, W), the error of the convolution's output as if every unit was on and the
            statistics did not depend on the sample: a at every position.
        weight: W (O, C, 3, 3) of the convolution.
        gradient: T (O, C, 3, 3), its gradient.

    Raises:
        ValueError: errors differ between positions, there are too many positions, or the masks are
            not found.
    """
    shared, positions = shared_error(error), error[0, 0].numel()
    rank = positions - 1
    if 2 * rank >= len(shared) / 2:
        raise ValueError(
            f"the gradient of the last convolution cannot determine {positions} masks behind "
            f"BatchNorm in train mode, as they span most of its {len(shared)} channels."
        )
    left, _, right = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    left, right = left[:, :rank], right[:rank].T
    second = layer.second / layer.deviation.square()
    directions = torch.cat([left, second[:, None] * (weight.flatten(1) @ right)], dim=1)
    offset = layer.first / layer.deviation / shared
    directions = directions / shared[:, None]
    clear = shared.abs() > 0.01 * shared.abs().median()
    masks = _binary_vectors(directions[clear], offset[clear], positions)
    if len(masks) != positions:
        raise ValueError(
            f"{positions} masks behind BatchNorm in train mode were sought, {len(masks)} found."
        )
    places = torch.linalg.lstsq(directions[clear], (masks - offset[clear]).T).solution
    masks = (offset[:, None] + directions @ places > 0.5).T
    patches = (places[rank:].T @ right.T).reshape(positions, *gradient.shape[1:])
    order = arrange(_uncentred(patches))
    normal = weight.flatten(1) @ right @ places[rank:][:, order] / layer.deviation[:, None]
    mask = masks[order].T.contiguous()  # see solve_features
    return mask.reshape(error.shape), normal.reshape(error.shape)


def _binary_vectors(directions: Tensor, offset: Tensor, count: int) -> Tensor:
    """Return up to ``count`` binary vectors (n, N) of an affine space, in any order.

    Args:
        directions: (N, R) columns that span the space.
        offset: (N,) a point of it.
        count: the number of vectors at which the search ends.
    """
    generator = torch.Generator().manual_seed(0)
    basis, offset = torch.linalg.qr(directions)[0].float(), offset.float()
    found: dict[bytes, Tensor] = {}
    for _ in range(0, VECTORS, AT_ONCE):
        vectors = torch.rand(AT_ONCE, len(offset), generator=generator).round()
        for _ in range(PROJECTIONS):
            near = offset + (vectors - offset) @ basis @ basis.T
            new = (near > 0.5).float()
            moved = (new != vectors).any(1)
            is_met = (near - new).square().mean(1).sqrt() < BINARY
            for vector in new[is_met & ~moved]:
                found[vector.bool().numpy().tobytes()] = vector
            vectors = new[moved]
            if not len(vectors):
                break
        if len(found) >= count:
            break
    whole = torch.stack(list(found.values())) if found else offset.new_zeros(0, len(offset))
    return whole.to(directions)


def _uncentred(patches: Tensor) -> Tensor:
    """Return patches (P, C, 3, 3) of a padded map from these patches less their mean."""
    mean = torch.zeros_like(patches[0])
    for row in range(3):
        for column in range(3):
            if (row, column) != (1, 1):
                mean[:, row, column] = -_commonest(patches[:, :, row, column])
    whole = patches + mean
    # The right entry of a patch is the centre of the next one, unless it is padding.
    right = whole[:, :, 1, 2]
    right = right[right.norm(dim=1) > SAME_VECTOR * right.norm(dim=1).max()]
    differences = right[:, None] - patches[None, :, :, 1, 1]
    whole[:, :, 1, 1] += _commonest(differences.flatten(0, 1))
    return whole


def _commonest(vectors: Tensor) -> Tensor:
    """Return the vector (C,) that most of the vectors (n, C) equal."""
    distances = torch.cdist(vectors, vectors)
    equal = distances <= SAME_VECTOR * distances.max()
    return vectors[equal[equal.sum(1).argmax()]].mean(0)
