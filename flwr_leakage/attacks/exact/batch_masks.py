"""Find samples of a batch by their ReLU masks, if the next layer's errors span few directions.

The gradient of a linear layer of m units with a ReLU behind it is a product S H. Column s of S is
one sample's *error* ∂L/∂z at the layer's outputs z, and row h of H is that sample's input. The
gradient of b samples shows the span of S: ``s = U q``, where U (m, b) is known and the b numbers q
are the sample's own, unknown ones. A sample's mask D says which units are on; s is zero at all
others.

Masks determine errors as follows. With the next layer's weights W₂, the errors of that layer lie in
a known span V₂ (of K − 1 directions for K logits, as errors of cross-entropy sum to zero). So a
sample's error is ``s = D W₂ᵀ V₂ e`` with few unknown numbers e, and also ``s = U q``. With D given,
each unit gives one equation about e and q. With e and q given, a unit is on if U q is nearer to
``W₂ᵀ V₂ e`` than to zero. Both steps in turn lead from the mask of a mixture of samples to the mask
of one sample (:func:`settle_masks`). Its error is exact before its input is: a second sample with a
small error changes the input that is read from a unit's gradient, but not the mask. The errors of
all samples together determine all inputs.

Zeros of S and H show masks, too. A column of S is zero for every unit that its sample leaves
inactive, and the rows of H have zeros if they come from a ReLU, or where an image is black. The
gradient gives the span of the columns of S and that of the rows of H. A sample's own vector in such
a span has more zeros than any mixture of samples (SPEAR: Dimitrov et al. 2024; dictionary learning:
SPEAR++ 2025). :func:`sparsest` finds such vectors.
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
    """Return a vector v (b,) of length 1, near a start (b,), for which ``M v`` has many zeros.

    It is a local minimum of ``Σ_j log((Mv)_j² + e²)`` on the unit sphere, as the width e falls
    (iteratively reweighted least squares with p = 0, Chartrand and Yin 2008). In each round two
    inverse iterations give v, the eigenvector of ``Mᵀ diag(1 / ((Mv)² + e²)) M`` with the smallest
    eigenvalue. M (m, b), ``basis``, has orthonormal columns. If ``nonnegative``, a negative entry
    of M v is penalised like an entry that should be zero.
    """
    vector = start / start.norm()
    values = basis @ vector
    # A small first width keeps the vector near its start. The first width and its decay were chosen
    # on development draws; no results are kept.
    width = 0.3 * float(values.abs().max())
    identity = torch.eye(len(vector), dtype=basis.dtype, device=basis.device)
    for _ in range(60):
        weights = 1 / (values.square() + width**2)
        if nonnegative:
            if values.sum() < 0:
                vector, values = -vector, -values
            weights = weights.where(values >= 0, 1 / width**2)
        matrix = basis.T @ (basis * weights[:, None])
        # This ridge is far below the smallest eigenvalue, and keeps every pivot of the Cholesky
        # factorisation above zero.
        matrix += 1e-13 * matrix.diagonal().sum() * identity
        factor = torch.linalg.cholesky(matrix)
        for _ in range(2):
            vector = torch.cholesky_solve(vector[:, None], factor)[:, 0]
            vector = vector / vector.norm()
        values = basis @ vector
        width *= 0.85
    return vector


def zero_entries(values: Tensor, at_least: int) -> Tensor | None:
    """Return which of m values are zero up to noise of unknown size, or None if no zeros stand out.

    The sorted magnitudes are split where two Gaussians of mean zero, one for each part, explain
    them best. Let the k smallest of the m entries have the root mean square σ₀ and the others σ₁.
    Then the k that minimises ``k log σ₀ + (m − k) log σ₁`` is taken (minimum error thresholding,
    Kittler and Illingworth 1986). The split needs no gap between the parts: some nonzero entries
    are always as small as the noise.

    Returns:
        Booleans (m,), true for at least ``at_least`` zeros; ``None`` if σ₁ < 10 σ₀ at the best
        split, or ``at_least`` ≥ m.
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
    # Unless the root mean squares of the two parts differ by a factor of ten, no zeros stand out.
    if float(high[count - 1]) < 10.0**2 * float(low[count - 1]):
        return None
    zeros = torch.zeros_like(values, dtype=torch.bool)
    zeros[order[:count]] = True
    return zeros


def null_vector(matrix: Tensor) -> tuple[Tensor, float]:
    """Return the unit vector v (b,) of least ``‖Mv‖`` for M (m, b), and how far v is from unique.

    The second result is the ratio of the smallest singular value of M to the second smallest. It is
    near 0 if v is the only null vector, and 1 if M has so few rows that there are several.
    """
    _, singular, right = torch.linalg.svd(matrix, full_matrices=matrix.shape[0] < matrix.shape[1])
    if matrix.shape[0] < matrix.shape[1] - 1:
        return right[-1], 1.0
    if matrix.shape[0] == matrix.shape[1] - 1 or len(singular) == 1:
        return right[-1], 0.0
    return right[-1], float(singular[-1] / singular[-2].clamp_min(1e-300))


@dataclass(frozen=True)
class MaskColumns:
    """Find the samples behind one layer's gradient by their ReLU masks.

    A sample's mask D says which of the layer's m units are on. A mask determines the sample's
    errors, the derivatives of its loss by the layer's outputs, if the next layer's errors span few
    directions; see :func:`settle_masks`.

    Attributes:
        layer: the layer whose gradient is split into samples.
        behind: ``W₂ᵀ V₂`` (m, d), the directions that a sample's errors may have before the mask.
            W₂ are the next layer's weights and V₂ spans its errors.
    """

    layer: BatchLayer
    behind: Tensor

    @classmethod
    def posed(cls, layer: BatchLayer, following: BatchLayer | None) -> "MaskColumns | None":
        """Return the mask search for a layer, or None if masks do not determine errors.

        Masks say which units are on, and errors are the derivatives of the loss by the layer's
        outputs. Masks do not determine errors if no next layer, ``following``, takes the ReLU of
        the layer's outputs, or if other paths of the network lead around the next layer. Nor do
        they if there are too few units: the number of units that some sample activates must exceed
        the sum of the ranks of both layers' gradients by at least ``SPARE_EQUATIONS``.
        """
        if following is None or not (layer.rectified and following.alone):
            return None
        if layer.surplus < following.factor.rank + SPARE_EQUATIONS:
            return None
        return cls(layer, following.matrix.T @ following.factor.left)

    def of_duals(self, duals: Tensor, found: Sequence[BatchSample]) -> Iterator[BatchSample]:
        """Yield the new samples to which the masks of M duals (b,) lead.

        A dual t (b,) is a row of ``duals`` (M, b), of any norm. It gives a candidate t R for a
        sample's input of the layer, where R (b, n) is the right factor of the layer's gradient. The
        search starts from the mask of the units that the candidate activates. ``found`` holds the
        samples that are found already.
        """
        duals = duals / (duals @ self.layer.factor.bias)[:, None]
        masks = duals @ self.layer.projected.T + self.layer.offset > 0
        return self._of_masks(masks, lambda start: self.layer.check(duals[start]), found)

    def of_candidate(
        self, candidate: BatchSample, found: Sequence[BatchSample]
    ) -> BatchSample | None:
        """Return the sample to which a candidate's mask leads, or None if there is no new one.

        The mask, which says which units the candidate activates, is corrected until it no longer
        changes. It then determines the derivative of a sample's loss by the layer's outputs; see
        :func:`settle_masks`. ``found`` are the samples already found.
        """
        mask = candidate.outputs[None] > 0
        return next(self._of_masks(mask, lambda _: candidate, found), None)

    def _of_masks(
        self,
        masks: Tensor,
        judged: Callable[[int], BatchSample | None],
        found: Sequence[BatchSample],
    ) -> Iterator[BatchSample]:
        """Yield the new samples that S masks (S, m), true for active units, give.

        Each mask is corrected until it no longer changes. It then determines the derivative of a
        sample's loss by the layer's outputs; see :func:`settle_masks`. ``judged`` maps a mask's
        index to its candidate sample, or to ``None`` if that candidate fails a check. ``found``
        holds the samples that are found already.
        """
        for start, errors, misfit in settle_masks(self.layer.factor.left, self.behind, masks):
            column = self._new_column(errors, misfit, found)
            candidate = None if column is None else judged(start)
            if candidate is not None and column is not None:
                yield self._told(candidate, errors, column, misfit, found)

    def limit(self, expected: float) -> float:
        """Return the misfit up to which a sample that a ReLU mask gives counts as true.

        A misfit is the part of the sample's errors, the derivatives of its loss by the layer's
        outputs, outside the span of the columns of the weight's gradient, in [0, 1]. The limit is
        ``EXACT_MULTIPLE`` times the misfit that noise of the gradient alone causes (``expected``),
        plus the misfit that rounding may cause.
        """
        return EXACT_MULTIPLE * expected + self._rounding

    def settled(self, found: Sequence[BatchSample]) -> list[BatchSample]:
        """Return the found samples, with inputs solved from the ∂L/∂z of all of them at once.

        If some samples of the batch are not found yet, each input is t R, with the sample's own
        dual t (b,) and the right factor R of the gradient, and only samples with exact inputs are
        returned. The derivatives ∂L/∂z are those by the layer's outputs z.
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
        """The misfit of a sample's errors that the rounding of the client's own pass may cause.

        Errors are the derivatives of the sample's loss by the layer's outputs. The misfit is their
        part outside the span of the columns of the weight's gradient, in [0, 1]. It is set to 100
        times the gradient's relative noise, within the limits ``FLOAT64_MISFIT`` and
        ``FLOAT32_RELATIVE_ERROR``. The factor was chosen on development draws; no table of
        results is kept.
        """
        factor = self.layer.factor
        entries = int(self.layer.live.sum()) * (factor.right.shape[1] + 1)
        noise = factor.noise * entries**0.5 / float(factor.singular.norm())
        return min(max(FLOAT64_MISFIT, 100.0 * noise), FLOAT32_RELATIVE_ERROR)

    def _new_column(
        self, errors: Tensor, misfit: float, found: Sequence[BatchSample]
    ) -> Tensor | None:
        """Return the coordinates q of a sample's errors ``s = U q``, or None if it is known.

        The errors s (m,), the derivatives of the loss by the layer's outputs, have length 1. The
        vector q (b,) has one entry for each column of U (m, b), the orthonormal left factor of the
        layer's gradient. A sample is known if at most a share of q lies outside the span of the
        found samples' q: 1e-6, or 10 times the misfit ``‖s − U q‖`` if that is more (chosen on
        development draws; no table of results is kept). None is also returned for a misfit above
        :meth:`limit`.
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
        """Return a candidate sample with its ∂L/∂z replaced by the vector s that a ReLU mask gave.

        ``errors`` s (m,) has length 1. ``column`` q (b,) holds its coordinates in the gradient's
        span, and ``misfit`` is the length of its part outside the span. A sample's dual t (b,)
        gives its input, and t·q = 1 for its own q. If t·q ≈ 1 for the candidate's t, once s is
        scaled to the candidate's own ∂L/∂z, then s belongs to the candidate, whose dual is kept.
        Otherwise the mask of the candidate led to another sample, whose dual is not known yet. In
        place of this dual, the result has the part of q outside the span of the samples in
        ``found``, scaled to t·q = 1.
        """
        scale, dual = float(errors @ candidate.errors), candidate.dual
        scale_error = abs(scale * float(column @ dual) - 1)
        # A candidate whose dual holds only small shares of other samples has a scale error below
        # 0.3, so that these errors are its own.
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
    """Return the part of a vector q (b,) outside the span of the found samples' columns.

    A sample's column (b,) holds the coordinates of its ∂L/∂z in the span of a layer's gradient,
    which has rank b.
    """
    if not found:
        return column
    columns = torch.stack([other.column for other in found], 1)
    return column - columns @ torch.linalg.lstsq(columns, column[:, None]).solution[:, 0]


def settle_masks(
    left: Float[Tensor, "m b"], behind: Float[Tensor, "m d"], masks: Bool[Tensor, "s m"]
) -> list[tuple[int, Tensor, float]]:
    """Return the errors that ReLU masks determine, once corrections no longer change the masks.

    For a mask D of active units, the errors s = ∂L/∂z (m,) are the vector of span(D W₂ᵀ V₂) with
    the least angle to span(U). So ``s = D W₂ᵀ V₂ e ≈ U q``, with some e and q. A unit of the
    corrected mask is on if U q is nearer to ``W₂ᵀ V₂ e`` than to zero. A correction takes m d (b +
    d) operations.

    ``masks`` (S, m) are true for active units. ``left`` is U, the orthonormal left factor of the
    layer's gradient. ``behind`` is a basis of W₂ᵀ V₂, with W₂ the next layer's weights and V₂ the
    span of its errors. A mask is left out if fewer than d + ``SPARE_EQUATIONS`` of its units are
    on, or if 40 corrections do not settle it.

    Returns:
        For each settled mask: the index of the given mask that it came from; its errors s (m,) of
        length 1; and the length of the part of s outside span(U), in [0, 1].
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
    # Errors from Gram matrices have only half of the digits. So the errors of settled masks are
    # computed anew.
    return [(start, *_nearest(left, behind, mask)) for start, mask in ends]


def _nearest(left: Tensor, behind: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Return the unit vector (m,) under a mask nearest to the gradient's span, and its distance.

    The vector is the derivative of a sample's loss by the layer's outputs. It lies in the span of
    the columns of ``behind`` (m, d), a basis of such derivatives before the mask, whose entries are
    set to zero where the mask (m,) of active units is false. U (m, b), ``left``, has orthonormal
    columns, which span the gradient's columns. The distance is the sine of the angle between the
    vector and span(U).
    """
    basis = torch.linalg.qr(torch.where(mask[:, None], behind, 0.0)).Q
    _, singular, right = torch.linalg.svd(basis - left @ (left.T @ basis), full_matrices=False)
    return basis @ right[-1], float(singular[-1])
