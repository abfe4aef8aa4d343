"""The gradient of a linear layer as a product of two thin factors, and its noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.rounding import FLOAT32_ROUNDING


@dataclass(frozen=True)
class LayerFactor:
    """The factors ``[∂L/∂W, ∂L/∂c] = U [R, β]`` of rank b, U with orthonormal columns.

    Let S (m × b) be the errors ∂L/∂Z of b samples and H (b × n) their inputs. Then
    ``∂L/∂W = S H``, ``S = U Q`` and ``H = T R`` with ``T = Q⁻¹``. A row t of T (a sample's dual)
    and a column q of Q are orthogonal if they belong to different samples. For one sample
    ``t·q = 1``, and ``t·β = 1``, as the bias is the weight of a further input that is always 1.

    Attributes:
        left: U (m, b).
        right: R (b, n).
        bias: β (b,).
        singular: singular values of ``[∂L/∂W, ∂L/∂c]`` in falling order; the first b exceed noise.
        noise: standard deviation of an entry of the gradient, estimated beyond rank b.
    """

    left: Tensor
    right: Tensor
    bias: Tensor
    singular: Tensor
    noise: float

    @property
    def rank(self) -> int:
        """The number b of samples whose errors are linearly independent."""
        return self.left.shape[1]

    def remainder(self, duals: Tensor, columns: Tensor) -> "tuple[LayerFactor, Tensor]":
        """Return the factors without f samples: ``U − (U Q)(T Q)⁻¹ T`` has rank b − f.

        Args:
            duals: T (f, b), the duals of those samples.
            columns: Q (b, f), the columns of those samples.

        Returns:
            The factors, and C (b − f, b), which maps a dual t of these to the dual ``t C`` of the
            original factors.
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
    """Return the factors of a gradient, with the rank at which its singular values reach noise.

    The range of ``[∂L/∂W, ∂L/∂c]`` is found by a random sketch (Halko, Martinsson and Tropp 2011)
    that is doubled until it holds as many directions of noise as of signal. Zero rows belong to
    units that no sample activates. They are left out, as they say nothing about noise: the singular
    values drop more at the number of nonzero rows than at the rank.

    Args:
        weight: ∂L/∂W (m, n).
        bias: ∂L/∂c (m,).
        most: the number of samples that the client reports. If the singular values show more, the
            rank exceeds it.
        generator: draws the sketch.
        above: a singular value is signal if it exceeds this multiple of ``noise · (√m + √n)``, the
            largest singular value that noise is expected to have.

    Raises:
        ValueError: the gradient has as many independent rows as it has rows or columns, or fewer
            than two nonzero rows.
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
        # A difference of squares would round to a false noise of 1e-8.
        outside = float((part - basis @ inside).square().sum())
        rank, noise = _split(part, columns, singular, outside, above)
        if 2 * rank <= size or size == limit:
            break
        size = min(2 * size, limit)
    if float(singular[rank - 1]) < 3.0 * float(singular[rank]):
        raise ValueError(
            f"its gradient, {rows} rows and {columns} columns that are not zero, has no gap in its "
            "singular values: there are too many samples for its size, or noise hides their number."
        )
    left = whole.new_zeros(len(whole), rank)
    left[live] = (basis @ inner)[:, :rank]
    right = singular[:rank, None] * outer[:rank]
    return LayerFactor(left, right[:, :-1], right[:, -1], singular, noise)


def _split(
    part: Tensor, columns: int, singular: Tensor, outside: float, above: float
) -> tuple[int, float]:
    """Return the rank and the noise's standard deviation, which are found from each other.

    Noise of float32 gradients is larger in larger entries. So singular values up to 30 times the
    threshold may still be noise (chosen on development draws; no table), and the widest gap among
    them decides. A layer of few rows has few singular values beyond the rank, and the last are far
    below the first. So the noise of a float32 gradient is at least its rounding.

    Args:
        part: the nonzero rows of the gradient.
        columns: number of nonzero columns.
        singular: the largest singular values of ``part``.
        outside: the sum of squares of ``part`` that these singular values leave.
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
    rounding = FLOAT32_ROUNDING * size / (rows * columns) ** 0.5 if is_single else 0.0
    last = len(singular) - 1
    while last > 1 and float(singular[last - 1]) <= above * max(noise(last), rounding) * edge:
        last -= 1
    first = last
    while first > 1 and float(singular[first - 1]) <= 30.0 * above * noise(last) * edge:
        first -= 1
    gaps = singular[first - 1 : last] / singular[first : last + 1].clamp_min(1e-300)
    rank = first + int(gaps.argmax())
    return rank, noise(rank)
