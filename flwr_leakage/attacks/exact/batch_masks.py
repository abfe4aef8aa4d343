"""Samples of a batch by the masks of a layer before that of the logits.

Where masks tell errors (``mask_columns``), columns are exact before inputs are: what another sample
of small error adds to a unit's gradient spoils the input that is read off it, but not its mask. All
columns together tell all inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_layer import EXACT, ROUNDING, BatchLayer, Candidate
from flwr_leakage.attacks.exact.mask_columns import LEAST, settle_masks

CERTAIN = 1e-8
"""A misfit of rounding in double precision."""

CLEAR = 100.0
"""The gradient's relative noise, times so much, is rounding of the client's own pass at most."""

SHARED = 0.3
"""Scale error up to which an input that is read off a unit is a sample's, but for small shares of
others."""

APART, ROUGH = 1e-6, 10.0
"""Least share of a column that is not in the span of the others, and in units of its own misfit:
less is one of them again."""


@dataclass(frozen=True)
class MaskColumns:
    """What masks tell of the samples behind one layer's gradient.

    Attributes:
        layer: whose gradient is split.
        behind: ``W₂ᵀ V₂`` (m, d).
    """

    layer: BatchLayer
    behind: Tensor

    @classmethod
    def posed(cls, layer: BatchLayer, following: BatchLayer | None) -> "MaskColumns | None":
        """Masks of a layer, if the one that follows leaves errors few enough directions."""
        if following is None or not (layer.rectified and following.alone):
            return None
        if layer.surplus < following.factor.rank + LEAST:
            return None
        return cls(layer, following.matrix.T @ following.factor.left)

    def of_duals(self, duals: Tensor, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """New samples, one after another, to whose masks those of duals (M, b) lead.

        Args:
            duals: mixtures of samples' duals, of any length.
            found: the samples that are known; what is appended to it meanwhile is known, too.
        """
        duals = duals / (duals @ self.layer.factor.bias)[:, None]
        masks = duals @ self.layer.projected.T + self.layer.offset > 0
        settled = settle_masks(self.layer.factor.left, self.behind, masks)
        for start, errors, misfit in zip(*vars(settled).values(), strict=True):
            column = self._new_column(errors, float(misfit), found)
            candidate = None if column is None else self.layer.check(duals[int(start)])
            if candidate is not None and column is not None:
                yield self._told(candidate, errors, column, float(misfit), found)

    def of_candidate(self, candidate: Candidate, found: Sequence[Candidate]) -> Candidate | None:
        """The sample that a candidate's mask leads to, if it is a new one."""
        mask = candidate.outputs[None] > 0
        settled = settle_masks(self.layer.factor.left, self.behind, mask)
        for errors, misfit in zip(settled.errors, settled.misfits, strict=True):
            column = self._new_column(errors, float(misfit), found)
            if column is not None:
                return self._told(candidate, errors, column, float(misfit), found)
        return None

    def limit(self, expected: float) -> float:
        """The largest misfit of a sample, of which noise alone explains some."""
        return EXACT * expected + self._rounding

    def settled(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Inputs of all columns together; of some, those that are exact by themselves."""
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
        """A misfit of rounding in the client's precision, as the gradient's noise shows it."""
        factor = self.layer.factor
        entries = int(self.layer.live.sum()) * (factor.right.shape[1] + 1)
        noise = factor.noise * entries**0.5 / float(factor.singular.norm())
        return min(max(CERTAIN, CLEAR * noise), ROUNDING)

    def _new_column(
        self, errors: Tensor, misfit: float, found: Sequence[Candidate]
    ) -> Tensor | None:
        """The column of errors (m,) that are explained to the noise, if no other has it."""
        column = self.layer.factor.left.T @ errors
        if misfit > self.limit(self.layer.expected(column, errors)):
            return None
        is_new = float(_apart(column, found).norm()) > max(APART, ROUGH * misfit)
        return column if is_new else None

    def _told(
        self,
        candidate: Candidate,
        errors: Tensor,
        column: Tensor,
        misfit: float,
        found: Sequence[Candidate],
    ) -> Candidate:
        """The sample of a column: the candidate itself, if it is that but for shares of others.

        Of another sample than the candidate, the dual is not told yet. Then it is the column's own
        part that is no mixture of those found.
        """
        scale, dual = float(errors @ candidate.errors), candidate.dual
        scale_error = abs(scale * float(column @ dual) - 1)
        if scale_error <= SHARED:
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


def _apart(column: Tensor, found: Sequence[Candidate]) -> Tensor:
    """The part of a column (b,) that is no mixture of those found."""
    if not found:
        return column
    columns = torch.stack([other.column for other in found], 1)
    return column - columns @ torch.linalg.lstsq(columns, column[:, None]).solution[:, 0]
