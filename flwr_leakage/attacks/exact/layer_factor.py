"""The gradient of a linear layer as a product of two thin factors, and what is left of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

DOUBTFUL = 30.0
"""Singular values below so many times the threshold may be noise all the same."""

ROUNDING = 2.0**-24
"""Noise of an entry of single precision, in units of the gradient's root mean square."""

MARGIN = 3.0
"""The least ratio of the singular values on both sides of the rank."""


@dataclass(frozen=True)
class LayerFactor:
    """``[∂L/∂W, ∂L/∂c] = U [R, β]`` of rank b, U with orthonormal columns.

    With S (m × b) the errors ∂L/∂Z of the b samples behind it and H (b × n) their inputs,
    ``∂L/∂W = S H``: ``S = U Q`` and ``H = T R`` with ``T = Q⁻¹``. A row t of T and a column q of Q
    of different samples are orthogonal, those of one sample have ``t·q = 1``, and ``t·β = 1``,
    as the bias is the weight of a further input that is 1 for every sample.

    Attributes:
        left: U (m, b).
        right: R (b, n).
        bias: β (b,).
        singular: the singular values of ``[∂L/∂W, ∂L/∂c]``, the b above noise first.
        noise: standard deviation of an entry, told by what is left beyond rank b.
    """

    left: Tensor
    right: Tensor
    bias: Tensor
    singular: Tensor
    noise: float

    @property
    def rank(self) -> int:
        """b, the number of samples whose errors are linearly independent."""
        return self.left.shape[1]

    def remainder(self, duals: Tensor, columns: Tensor) -> "tuple[LayerFactor, Tensor]":
        """What is left without f samples: ``U − (U Q)(T Q)⁻¹ T`` has rank b − f.

        Args:
            duals: T (f, b) of those samples.
            columns: Q (b, f).

        Returns:
            The factor, and C (b − f, b): a dual t of what is left is ``t C`` here.
        """
        projection = torch.eye(self.rank).to(self.left) - columns @ torch.linalg.solve(
            duals @ columns, duals
        )
        kept = self.rank - len(duals)
        # U is orthonormal, so that the small matrix has all of the remainder's singular values.
        inner, singular, outer = torch.linalg.svd(projection)
        lift = singular[:kept, None] * outer[:kept]
        left = self.left @ inner[:, :kept]
        return LayerFactor(left, lift @ self.right, lift @ self.bias, singular, self.noise), lift


def factorize(
    weight: Tensor, bias: Tensor, most: int, generator: torch.Generator, above: float = 2.5
) -> LayerFactor:
    """Split a gradient at its noise.

    The range of ``[∂L/∂W, ∂L/∂c]`` is found by a random sketch (Halko, Martinsson and Tropp 2011)
    that is doubled until it holds as many directions of noise as of signal. Rows that are zero are
    units that no sample activates: they tell nothing about noise and are left out, as the drop of
    the singular values at the number of the other rows is wider than that at the rank.

    Args:
        weight: ∂L/∂W (m, n).
        bias: ∂L/∂c (m,).
        most: the number of samples that the client reports; where the spectrum shows more, these
            are kept as well.
        generator: of the sketch.
        above: a singular value is signal if it is so many times the largest one that noise of
            this size is expected to have, ``noise · (√m + √n)``.

    Raises:
        ValueError: the gradient has as many independent rows as it has rows or columns.
    """
    whole = torch.cat([weight, bias[:, None]], dim=1)
    live = whole.abs().amax(1) > 0
    rows, columns = int(live.sum()), int((whole.abs().amax(0) > 0).sum())
    part = whole[live]
    limit = min(rows, columns)
    size = min(2 * most + 16, limit)
    while True:
        if size < limit:
            sketch = torch.randn(part.shape[1], size, generator=generator, dtype=torch.float64)
            basis = torch.linalg.qr(part @ sketch.to(part)).Q
            basis = torch.linalg.qr(part @ (part.T @ basis)).Q
        else:
            basis = torch.eye(rows).to(part)
        inside = basis.T @ part
        inner, singular, outer = torch.linalg.svd(inside, full_matrices=False)
        singular, outer, inner = singular[:limit], outer[:limit], inner[:, :limit]
        # Not the difference of squares, whose rounding would pass for noise of 1e-8.
        outside = float((part - basis @ inside).square().sum())
        rank, noise = _split(part, columns, singular, outside, above)
        if 2 * rank <= size or size == limit:
            break
        size = min(2 * size, limit)
    if float(singular[rank - 1]) < MARGIN * float(singular[rank]):
        raise ValueError(
            f"its gradient, {rows} rows and {columns} columns that are not zero, shows no rank: "
            "the samples are too many for its size, or noise hides it."
        )
    left = whole.new_zeros(len(whole), rank)
    left[live] = (basis @ inner)[:, :rank]
    right = singular[:rank, None] * outer[:rank]
    return LayerFactor(left, right[:, :-1], right[:, -1], singular, noise)


def _split(
    part: Tensor, columns: int, singular: Tensor, outside: float, above: float
) -> tuple[int, float]:
    """The rank and the noise's standard deviation, each told from the other.

    Noise of float32 gradients is larger in larger entries: the least values above its expected
    size may still be noise, and the widest gap among them decides. A layer of few rows has few
    values to tell it by, and the last ones are far below the first. So a gradient of single
    precision is told no finer than its rounding.

    Args:
        part: the rows that are not zero.
        columns: how many columns are not zero.
        singular: its largest singular values.
        outside: the sum of squares that these leave.
        above: see :func:`factorize`.
    """
    rows = len(part)
    if len(singular) < 2:
        raise ValueError(
            "the layer's weight gradient must have at least two rows that are not zero, got "
            f"{len(singular)}."
        )
    edge = rows**0.5 + columns**0.5
    floor = 1e-15 * float(singular[0]) / edge

    def noise(rank: int) -> float:
        rest = float(singular[rank:].square().sum()) + outside
        return max((rest / ((rows - rank) * (columns - rank))) ** 0.5, floor)

    is_single = torch.equal(part, part.float().to(part))
    size = float(part.norm())
    rounding = ROUNDING * size / (rows * columns) ** 0.5 if is_single else 0.0
    last = len(singular) - 1
    while last > 1 and float(singular[last - 1]) <= above * max(noise(last), rounding) * edge:
        last -= 1
    first = last
    while first > 1 and float(singular[first - 1]) <= DOUBTFUL * above * noise(last) * edge:
        first -= 1
    gaps = singular[first - 1 : last] / singular[first : last + 1].clamp_min(1e-300)
    rank = first + int(gaps.argmax())
    return rank, noise(rank)
