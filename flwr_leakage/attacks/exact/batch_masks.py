"""Find samples of a batch by their ReLU masks, if the next layer has few directions of errors.

A layer with weights W₂ follows a linear layer with ReLU. If a mask determines a sample's errors
(:func:`settle_masks`), these errors are exact before the sample's input is. A second sample with a
small error changes a unit's gradient, and with it the input that is read from it, but not its mask.
The errors of all samples together determine all inputs.

Masks determine errors as follows. The errors of the next layer lie in a known span V₂ (of K − 1
directions for K logits, as errors of cross-entropy sum to zero). A sample's errors before the ReLU
are ``s = D W₂ᵀ V₂ e`` with its mask D, and also ``s = U q``, as they are one column of the
gradient's factor S. With D given, this is an equation for each unit about the few numbers e and q.
With e and q given, a unit is on if U q is nearer to ``W₂ᵀ V₂ e`` than to zero. Both steps in turn
lead from the mask of a mixture of samples to the mask of one sample. The layer's inputs are not
used.

Masks also show as zeros. A column of S is zero for every unit that its sample leaves inactive, and
the layer's inputs have zeros behind a ReLU, or where an image is black. The gradient gives the
spans of both. A sample's own vector is sparser there than any mixture of samples (SPEAR: Dimitrov
et al. 2024; dictionary learning: SPEAR++ 2025). :func:`sparsest` finds such vectors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.exact.batch_layer import EXACT_MULTIPLE, BatchLayer, BatchSample
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, FLOAT64_MISFIT, SPARE_EQUATIONS


def sparsest(basis: Tensor, start: Tensor, nonnegative: bool = False) -> Tensor:
    """Return a vector v, near a start, for which ``basis @ v`` has many zeros.

    It is a local minimum of ``Σ_j log((Mv)_j² + e²)`` on the unit sphere, as the width e falls
    (iteratively reweighted least squares with p = 0, Chartrand and Yin 2008). In each round two
    inverse iterations give v, the smallest eigenvector of ``Mᵀ diag(1 / ((Mv)² + e²)) M``.

    Args:
        basis: M (m, b), with orthonormal columns.
        start: (b,) the vector to start from, of any length.
        nonnegative: whether a negative entry is penalised like an entry that should be zero.

    Returns:
        v (b,) of length 1.
    """
    vector = start / start.norm()
    values = basis @ vector
    # A small first width keeps the vector near its start. It and its decay were chosen on
    # development draws; there is no table.
    width = 0.3 * float(values.abs().max())
    identity = torch.eye(len(vector), dtype=basis.dtype, device=basis.device)
    for _ in range(60):
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
        width *= 0.85
    return vector


def zero_entries(values: Tensor, at_least: int) -> Tensor | None:
    """Return which entries are zero up to noise of unknown size, or None if none stand out.

    The sorted magnitudes are split where two Gaussians of mean zero, one for each part, explain
    them best. The k entries below the split have the root mean square σ₀, the m − k above it σ₁,
    and ``k log σ₀ + (m − k) log σ₁`` is least (minimum error thresholding, Kittler and Illingworth
    1986). This needs no gap between them: some nonzero entries are always as small as the noise.

    Args:
        values: (m,) the entries.
        at_least: least number of zeros.

    Returns:
        (m,) booleans, true for zeros; ``None`` if no split has parts that differ by ten times in
        size, or ``at_least`` ≥ m.
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
    # The entries in both parts must differ in size by a factor of ten.
    if float(high[count - 1]) < 10.0**2 * float(low[count - 1]):
        return None
    zeros = torch.zeros_like(values, dtype=torch.bool)
    zeros[order[:count]] = True
    return zeros


def null_vector(matrix: Tensor) -> tuple[Tensor, float]:
    """Return the unit vector v of least ``‖Mv‖``, and the ratio of M's least singular values.

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


@dataclass(frozen=True)
class MaskColumns:
    """Find the samples behind one layer's gradient by their ReLU masks.

    Attributes:
        layer: the layer whose gradient is split.
        behind: ``W₂ᵀ V₂`` (m, d), the directions that a sample's errors may have before the mask;
            see :func:`settle_masks`.
    """

    layer: BatchLayer
    behind: Tensor

    @classmethod
    def posed(cls, layer: BatchLayer, following: BatchLayer | None) -> "MaskColumns | None":
        """Return the mask solver for a layer, or None if masks do not determine its errors.

        They do not if no next layer takes the ReLU of the layer's outputs, if other paths lead
        around the next layer, or if the layer has fewer live units than the ranks of both layers'
        gradients and ``SPARE_EQUATIONS`` together.
        """
        if following is None or not (layer.rectified and following.alone):
            return None
        if layer.surplus < following.factor.rank + SPARE_EQUATIONS:
            return None
        return cls(layer, following.matrix.T @ following.factor.left)

    def of_duals(self, duals: Tensor, found: Sequence[BatchSample]) -> Iterator[BatchSample]:
        """Return the new samples that the masks of duals (M, b) lead to, one after another."""
        duals = duals / (duals @ self.layer.factor.bias)[:, None]
        masks = duals @ self.layer.projected.T + self.layer.offset > 0
        return self._of_masks(masks, lambda start: self.layer.check(duals[start]), found)

    def of_candidate(
        self, candidate: BatchSample, found: Sequence[BatchSample]
    ) -> BatchSample | None:
        """Return the sample that a candidate's mask leads to, or None if it is not new."""
        mask = candidate.outputs[None] > 0
        return next(self._of_masks(mask, lambda _: candidate, found), None)

    def _of_masks(
        self,
        masks: Tensor,
        judged: Callable[[int], BatchSample | None],
        found: Sequence[BatchSample],
    ) -> Iterator[BatchSample]:
        """Yield the new samples that masks (S, m) lead to; ``judged`` maps a mask's index."""
        for start, errors, misfit in settle_masks(self.layer.factor.left, self.behind, masks):
            column = self._new_column(errors, misfit, found)
            candidate = None if column is None else judged(start)
            if candidate is not None and column is not None:
                yield self._told(candidate, errors, column, misfit, found)

    def limit(self, expected: float) -> float:
        """Return the misfit up to which a sample counts as true.

        It is ``EXACT_MULTIPLE`` times the misfit ``expected`` that noise causes, and the rounding.
        """
        return EXACT_MULTIPLE * expected + self._rounding

    def settled(self, found: Sequence[BatchSample]) -> list[BatchSample]:
        """Return the samples, with inputs solved from the errors of all samples at once.

        If some samples are not found yet, only those are returned whose own errors already give
        exact inputs.
        """
        duals = [sample.dual for sample in found]
        is_whole = len(found) == self.layer.factor.rank
        if is_whole:
            columns = torch.stack([sample.column for sample in found], 1)
            duals = list(torch.linalg.pinv(columns))
        checked = [self.layer.check(dual) for dual in duals]
        told = [each for each in checked if each is not None]
        return told if is_whole else [each for each in told if each.is_exact]

    @cached_property
    def _rounding(self) -> float:
        """The misfit that the rounding of the client's own pass may cause.

        It is 100 times the gradient's relative noise, between the rounding of float64 and that of
        float32 (the factor was chosen on development draws; no table).
        """
        factor = self.layer.factor
        entries = int(self.layer.live.sum()) * (factor.right.shape[1] + 1)
        noise = factor.noise * entries**0.5 / float(factor.singular.norm())
        return min(max(FLOAT64_MISFIT, 100.0 * noise), FLOAT32_RELATIVE_ERROR)

    def _new_column(
        self, errors: Tensor, misfit: float, found: Sequence[BatchSample]
    ) -> Tensor | None:
        """Return the column q (b,) of errors s = U q, or None if it is known or misfits too much.

        A column is known if at most a share of 1e-6, or 10 times its own misfit, lies outside the
        span of the found samples' columns (chosen on development draws; no table).
        """
        column = self.layer.factor.left.T @ errors
        if misfit > self.limit(self.layer.expected(column, errors)):
            return None
        is_new = float(_apart(column, found).norm()) > max(1e-6, 10.0 * misfit)
        return column if is_new else None

    def _told(
        self,
        candidate: BatchSample,
        errors: Tensor,
        column: Tensor,
        misfit: float,
        found: Sequence[BatchSample],
    ) -> BatchSample:
        """Return the sample with given errors, which keeps the candidate's dual if it is the same.

        A large scale error shows that the errors belong to another sample than the candidate, whose
        dual is not known yet. In its place stands the part of the errors' column outside the span
        of the columns found.
        """
        scale, dual = float(errors @ candidate.errors), candidate.dual
        scale_error = abs(scale * float(column @ dual) - 1)
        # If the candidate's dual holds small shares of other samples, the scale error is below
        # this.
        if scale_error <= 0.3:
            errors, column = scale * errors, scale * column
        else:
            apart = _apart(column, found)
            dual, scale_error = apart / float(apart @ column), 0.0
        return replace(
            candidate,
            dual=dual,
            errors=errors,
            column=column,
            misfit=misfit,
            expected=self.layer.expected(column, errors),
            scale_error=scale_error,
        )


def _apart(column: Tensor, found: Sequence[BatchSample]) -> Tensor:
    """Return the part of a column q (b,) outside the span of the found samples' columns."""
    if not found:
        return column
    columns = torch.stack([other.column for other in found], 1)
    return column - columns @ torch.linalg.lstsq(columns, column[:, None]).solution[:, 0]


def settle_masks(
    left: Float[Tensor, "m b"], behind: Float[Tensor, "m d"], masks: Bool[Tensor, "s m"]
) -> list[tuple[int, Tensor, float]]:
    """Return the errors that masks give, once corrections no longer change the masks.

    For a mask D, the errors are the vector of span(D W₂ᵀ V₂) with the least angle to span(U). A
    unit is then on if U q is nearer to the unmasked errors than to zero. A correction takes
    m d (b + d) operations for each mask.

    Args:
        left: U (m, b), the orthonormal columns of the factored gradient.
        behind: a basis (m, d) of W₂ᵀ V₂, with W₂ the next layer's weights and V₂ the span of its
            errors.
        masks: (s, m) masks to start from. A mask needs ``SPARE_EQUATIONS`` more units that are on
            than directions d, and is left out otherwise.

    Returns:
        For each mask that no further correction changes, the index of the mask that it came from,
        its errors (m,) of length 1, and the share of these outside the span of U, in [0, 1].
    """
    behind = torch.linalg.qr(behind).Q
    directions = behind.shape[1]
    products = (behind[:, :, None] * behind[:, None]).flatten(1)
    starts, ends = torch.arange(len(masks)), []
    for _ in range(40):
        enough = masks.sum(1) >= directions + SPARE_EQUATIONS
        masks, starts = masks[enough], starts[enough]
        if not len(masks):
            break
        masked = torch.where(masks.T[:, :, None], behind[:, None], 0.0)  # D W₂ᵀ V₂, (m, S, d)
        inside = (left.T @ masked.flatten(1)).reshape(-1, *masked.shape[1:]).transpose(0, 1)
        gram = (masks.to(behind) @ products).reshape(-1, directions, directions)
        # The rows of the active units may be dependent; the ridge keeps the Cholesky root finite.
        gram.diagonal(dim1=1, dim2=2).add_(1e-10 * float(gram.amax()))
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        through = inside @ root.mT
        angles = torch.linalg.eigh(through.mT @ through).eigenvectors[:, :, -1:]
        mixtures = root.mT @ angles  # mixtures e of directions, (S, d, 1)
        fits = (inside @ mixtures)[:, :, 0] @ left.T
        corrected = (fits - mixtures[:, :, 0] @ behind.T).abs() < fits.abs()
        same = (corrected == masks).all(1)
        ends += list(zip(starts[same].tolist(), masks[same], strict=True))
        masks, starts = corrected[~same], starts[~same]
    # Errors from Gram matrices have only half of the digits. So the final errors are computed anew.
    return [(start, *_nearest(left, behind, mask)) for start, mask in ends]


def _nearest(left: Tensor, behind: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Return the errors (m,) under a mask with the least angle to span(U), and the angle's sine."""
    basis = torch.linalg.qr(torch.where(mask[:, None], behind, 0.0)).Q
    _, singular, right = torch.linalg.svd(basis - left @ (left.T @ basis), full_matrices=False)
    return basis @ right[-1], float(singular[-1])
