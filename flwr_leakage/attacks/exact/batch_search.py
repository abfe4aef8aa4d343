"""Search for the samples behind a linear layer's gradient, one after another.

Every sample found is taken out of the equations, and makes the rest easier. Proposals come from

* ``lifting``: all that are left at once, where they are few enough (``quadratic_lifting``);
* ``peeling``: a unit that one sample alone activates has that sample's input as its gradient
  (Cascading: Shariati and Alambardar 2026);
* ``errors``: a sparse vector of the span of S gives a mask;
* ``features``: a sparse nonnegative vector of the span of the next layer's inputs gives a mask;
* ``inputs``: a sparse nonnegative vector of the span of the layer's own inputs (outputs of a ReLU,
  or images with black pixels) is a sample's input itself;
* ``rays``: the same for outputs of a ReLU, by linear programs from a unit's gradient, which lead to
  many samples where one or two attract nearly all starts of ``inputs``;
* ``masks``: where the next layer is that of the logits, a mask tells a sample's errors, and these
  correct the mask. From that of a unit's gradient, a mixture of the samples that activate it, this
  ends at the mask of one of them.

A mask becomes an input by closure: the next layer's inputs a, which the next gradient spans, are
zero off the mask, which leaves one of them; on the mask the layer's outputs are a. The outputs that
this gives correct the mask, until it agrees with itself. Every proposal is judged by the network
behind (``BatchLayer.check``).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.batch_layer import EXACT, ROUNDING, ZERO, BatchLayer, Candidate
from flwr_leakage.attacks.exact.batch_masks import CERTAIN, MaskColumns
from flwr_leakage.attacks.exact.layer_factor import LayerFactor
from flwr_leakage.attacks.exact.quadratic_lifting import fits, lifted_columns
from flwr_leakage.attacks.exact.sparse_columns import (
    extreme_ray,
    null_vector,
    sparsest,
    zero_entries,
)

FROM_ROWS = 0.75
"""The share of starts at a row of U instead of a Gaussian vector."""

UNCHANGED = 1e-9
"""A unit's direction that moved by less is the same."""

ALONE = 0.1
"""A larger misfit of a unit's gradient shows that several samples activate it."""

TOGETHER = 32
"""Units whose masks are corrected at once."""

REPAIRABLE = 0.6
"""A misfit that one wrong sign of a unit may cause. What is no sample mostly leaves more."""

REPAIRS = 5
"""Times that wrong signs of the last sample's units are looked for, by chance."""

CORRECTIONS = 6
"""Times that a mask is corrected by the forward pass."""


@dataclass(frozen=True)
class SearchSettings:
    """How long is searched.

    Attributes:
        starts: the most random starts.
        max_seconds: CPU seconds after which no further start is made.
        patience: after so many proposals in a row that fail, the duals found are computed anew.
    """

    starts: int = 3000
    max_seconds: float = 60.0
    patience: int = 100


@dataclass(frozen=True)
class _Rest:
    """What is left of the equations.

    Attributes:
        layer: the layer attacked.
        factor: of what is left of its gradient, rank r.
        lift: C (r, b): a dual t of what is left is t C.
        behind: a basis (m, d) of ``W₂ᵀ S₂`` of what is left, or ``None`` where other paths lead
            around the next layer.
        features: an orthonormal basis (m, r) of the next layer's inputs left, or ``None``.
    """

    layer: BatchLayer
    factor: LayerFactor
    lift: Tensor
    behind: Tensor | None
    features: Tensor | None

    @cached_property
    def live(self) -> Tensor:
        """(m,) units whose errors are not all taken out."""
        sizes = self.factor.left.norm(dim=1)
        return sizes > ZERO * sizes.max()

    @cached_property
    def projected(self) -> Tensor:
        """``W Rᵀ`` (m, r)."""
        return self.layer.projected @ self.lift.T

    @cached_property
    def pixels(self) -> Tensor:
        """(n', r) the inputs' span, a row an input, see :meth:`BatchLayer.in_pixels`."""
        return self.layer.in_pixels(self.factor.right, self.factor.bias).T

    @cached_property
    def orthonormal(self) -> tuple[Tensor, Tensor]:
        """QR of the inputs' span."""
        basis, triangle = torch.linalg.qr(self.pixels)
        return basis, triangle


class BatchSearch:
    """Finds samples behind one layer's gradient.

    Args:
        layer: whose gradient is split.
        following: the layer that takes in the ReLU of this one's outputs, if there is one.
        settings: of the search.
        generator: of all starts.

    Attributes:
        found: the samples.
        proposals: how many came from each source.
        accepted: how many of these were accepted.
    """

    def __init__(
        self,
        layer: BatchLayer,
        following: BatchLayer | None,
        settings: SearchSettings,
        generator: torch.Generator,
    ) -> None:
        self.layer = layer
        self.following = following
        self.settings = settings
        self.generator = generator
        self.found: list[Candidate] = []
        self.proposals: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self._following_duals: list[Tensor] = []
        self._following_columns: list[Tensor] = []
        self._misses = 0
        self._lifted = torch.inf  # samples left when lifting was tried last
        # The next layer tells its inputs only where its errors are of full rank.
        self._linked = following is not None and following.factor.rank == layer.factor.rank
        self._features = following.factor.right.T if following and self._linked else None
        self._masks = None if self._linked else MaskColumns.posed(layer, following)
        self._rest = self._remainder()
        self._peeled = torch.zeros_like(layer.factor.left)  # duals of units when tried last
        self._misfits = torch.full_like(layer.offset, torch.inf)  # of these

    def run(self) -> list[Candidate]:
        """Search until all samples are found or the budget is spent."""
        budget = Budget.of(self.settings.max_seconds)
        sources = self._sources()
        peeled = -1  # samples found when peeling was tried last
        for _ in range(self.settings.starts):
            self._lift()
            if len(self.found) > peeled and self._may_peel(peeled < 0):
                self._peel(budget)
                peeled = len(self.found)
            if not sources:
                break
            if self._left <= 1 or budget.is_spent:
                break
            chances = [
                (self.accepted.get(source, 0) + 1) / (self.proposals.get(source, 0) + 2)
                for source in sources
            ]
            chosen = int(torch.multinomial(torch.tensor(chances), 1, generator=self.generator))
            if sources[chosen] == "masks":
                assert self._masks is not None
                self._from_units(self._masks)
            else:
                self._propose(sources[chosen])
        for _ in range(REPAIRS):
            if self._left == 1:  # the last sample is all that is left
                self._judge("last", self.layer.factor.bias.new_ones(1))
        if self._left == 1:  # errors that are nearly dependent leave little of it
            self._judge("last by zeros", None, self._last_by_zeros())
        if self._masks is not None:
            self.found = self._masks.settled(self.found)
        return self.found

    @property
    def _left(self) -> int:
        return self.layer.factor.rank - len(self.found)

    def _sources(self) -> list[str]:
        layer = self.layer
        sources = ["errors", "features"] if layer.rectified and self._linked else []
        sources += ["masks"] * (self._masks is not None)
        sources += ["inputs"] * (layer.takes_input or layer.sparse_inputs)
        return sources + ["rays"] * layer.sparse_inputs

    def _propose(self, source: str) -> None:
        """One random start of a source."""
        rest, rank = self._rest, self._left
        live = rest.live.nonzero()[:, 0]
        row = rest.factor.left[live[int(torch.randint(len(live), (), generator=self.generator))]]
        noise = torch.randn(rank, generator=self.generator, dtype=torch.float64).to(row)
        from_row = float(torch.rand((), generator=self.generator)) < FROM_ROWS
        start = row if from_row else noise
        dual: Tensor | None = None
        if source == "errors":
            active = rest.factor.left[live]
            zeros = zero_entries(active @ sparsest(active, start), rank)
            if zeros is not None:
                mask = rest.live.clone()
                mask[live] = ~zeros
                dual = self._close(mask)
        elif source == "features":
            assert rest.features is not None
            values = rest.features @ sparsest(rest.features, noise, nonnegative=True)
            live = rest.features.abs().amax(1) > ZERO  # what no sample activates tells nothing
            zeros = zero_entries(values[live], rank)
            if zeros is not None:
                mask = live.clone()
                mask[live] = ~zeros
                dual = self._close(mask)
        else:
            basis, triangle = rest.orthonormal
            if source == "rays":
                vector = extreme_ray(basis, triangle @ row)
            else:
                vector = sparsest(basis, triangle @ start, nonnegative=True)
            zeros = None if vector is None else zero_entries(basis @ vector, rank)
            if zeros is not None:
                dual, _ = null_vector(rest.pixels[zeros])
        self._judge(source, dual)

    def _close(self, mask: Tensor) -> Tensor | None:
        """The dual (r,) of the sample with a mask, corrected by its own outputs."""
        assert self._features is not None
        features, offset = self._features, self.layer.offset
        dual = None
        for _ in range(CORRECTIONS):
            if int((~mask).sum()) < features.shape[1] or int(mask.sum()) < self._left + 2:
                return None
            dual = self._solved(mask, self._rest.projected)
            corrected = self._rest.projected @ dual + offset > 0
            if torch.equal(corrected, mask):
                break
            mask = corrected
        return dual

    def _solved(self, mask: Tensor, projected: Tensor) -> Tensor:
        """The dual whose outputs on a mask are the next layer's inputs that are zero off it.

        Args:
            mask: (m,).
            projected: (m, r) the outputs of r basic duals, without the offset.
        """
        assert self._features is not None
        mixture, _ = null_vector(self._features[~mask])
        outputs = self._features @ mixture
        # W h + c = λ a on the mask, in the dual of h and λ.
        share = projected.norm() / outputs.norm()
        equations = torch.cat([projected[mask], -share * outputs[mask, None]], dim=1)
        offset = -self.layer.offset[mask, None]
        return torch.linalg.lstsq(equations, offset).solution[:-1, 0]

    def _may_peel(self, first: bool) -> bool:
        """Whether units that one sample alone activates are worth a pass of all units.

        Where masks are told otherwise, too, many samples mostly share each unit, and it is tried
        once, and again after each sample if that has found any.
        """
        if not self.layer.rectified:
            return False
        rarely = self._linked or self._masks is not None
        return not rarely or first or "peeling" in self.accepted

    def _peel(self, budget: Budget) -> None:
        """Try every unit's gradient as one sample's input, the surest first.

        A unit that two samples activate shows one of them once the other is found, so that few
        samples found by other means may set off many. A unit may seem alone where a second
        sample's error is small. Such inputs are not exact and spoil what is left, so that each
        round takes those whose misfit is near the least only.
        """
        while self._left > 1 and not budget.is_spent:
            rest = self._rest
            duals = rest.factor.left @ rest.lift
            duals = duals / duals.norm(dim=1, keepdim=True).clamp_min(1e-300)
            # A unit's direction stays as it is where no sample found activates it.
            moved = (duals - self._peeled).norm(dim=1) > UNCHANGED
            self._misfits[moved] = torch.inf
            tried = (moved & rest.live & self._activates(duals)).nonzero()[:, 0]
            if len(tried):
                self._misfits[tried] = self.layer.misfits(duals[tried])
            self._peeled = duals
            before = len(self.found)
            while len(self.found) == before:
                least = float(self._misfits.min())
                if least > ALONE:
                    return
                limit = min(max(10 * least, CERTAIN), ALONE)
                for unit in (self._misfits <= limit).nonzero()[:, 0].tolist():
                    if self._left:
                        self._judge("peeling", None, duals[unit])
                    self._misfits[unit] = torch.inf

    def _activates(self, duals: Tensor) -> Tensor:
        """(m,) which units are active at the input of their own dual (m, b)."""
        layer = self.layer
        return (layer.projected * duals).sum(1) / (duals @ layer.factor.bias) + layer.offset > 0

    def _lift(self) -> None:
        """All samples that are left, by quadratic lifting, where there are units enough."""
        rest, rank = self._rest, self._left
        if not self.layer.rectified or rest.behind is None or rank < 2:
            return
        live = rest.live
        if rank > 0.7 * self._lifted or not fits(int(live.sum()), rank, rest.behind.shape[1]):
            return
        self._lifted = rank
        left = rest.factor.left
        columns = lifted_columns(left[live], rest.behind[live], self.generator)
        for _ in range(2):
            duals = torch.linalg.pinv(columns)
            for index, dual in enumerate(duals):
                columns[:, index] = self._cleaned(columns[:, index], dual)
        lift = rest.lift
        for dual in torch.linalg.pinv(columns) @ lift:
            self._judge("lifting", None, dual)

    def _cleaned(self, column: Tensor, dual: Tensor) -> Tensor:
        """A column of Q by the zeros that it has, where they leave one only."""
        rest = self._rest
        values = rest.factor.left @ column
        zeros = zero_entries(values[rest.live], self._left)
        if zeros is None:
            return column
        cleaned, ratio = null_vector(rest.factor.left[rest.live][zeros])
        if ratio > 0.1 or float((cleaned @ column).abs()) < 0.9 * float(column.norm()):
            return column
        return cleaned

    def _judge(self, source: str, dual: Tensor | None, whole: Tensor | None = None) -> bool:
        """Accept a dual of what is left, or a whole one, if the network behind confirms it."""
        self.proposals[source] = self.proposals.get(source, 0) + 1
        if whole is None:
            if dual is None:
                return False
            whole = dual @ self._rest.lift
        candidate = self.layer.check(whole)
        if candidate is not None:
            candidate = self._passed(candidate)
        if candidate is None:
            # A pass of all units is one attempt, of which most fail at all times.
            if source != "peeling":
                self._misses += 1
                if self._misses == self.settings.patience:
                    self._refresh()
            return False
        self._take(source, candidate)
        return True

    def _take(self, source: str, candidate: Candidate) -> None:
        """Note a sample, and what is left without it."""
        self._misses = 0
        self.found.append(candidate)
        self.accepted[source] = self.accepted.get(source, 0) + 1
        if self._left:
            self._follow(candidate)
            self._rest = self._remainder()

    def _last_by_zeros(self) -> Tensor | None:
        """The dual of the last sample by the zeros of what is left, where these are enough."""
        layer = self.layer
        if not (layer.takes_input or layer.sparse_inputs):
            return None
        dual = self._rest.lift[0]
        for _ in range(REPAIRS):
            zeros = zero_entries(dual @ layer.right, layer.factor.rank)
            if zeros is None:
                return None
            dual, _ = null_vector(layer.right.T[zeros])
        return dual

    def _is_known(self, dual: Tensor) -> bool:
        """Whether a dual (b,) is not dual to the columns found, as another sample's would be."""
        scale = float(dual @ self.layer.factor.bias)
        return any(abs(float(dual @ other.column)) > 0.5 * abs(scale) for other in self.found)

    def _passed(self, candidate: Candidate) -> Candidate | None:
        """The candidate, repaired, if it is explained to the noise.

        What is nearly right would spoil what is left, and all that is found after it.
        """
        told = None if self._masks is None else self._masks.of_candidate(candidate, self.found)
        if told is not None:
            return told
        if max(candidate.misfit, candidate.scale_error) > REPAIRABLE:
            return None
        if self._is_known(candidate.dual):
            return None
        if not candidate.is_exact:
            candidate = self.layer.repaired(candidate, self.generator)
        is_exact = candidate.is_exact
        if self._masks is not None:  # what a mask does not tell may be spoilt in double precision
            is_exact = is_exact and candidate.misfit <= self._masks.limit(candidate.expected)
        return candidate if is_exact else None

    def _from_units(self, masks: MaskColumns) -> None:
        """Masks of some units' gradients, as far as they lead to samples."""
        rest = self._rest
        live = rest.live.nonzero()[:, 0]
        drawn = torch.randint(len(live), (TOGETHER,), generator=self.generator)
        duals = rest.factor.left[live[drawn]] @ rest.lift
        self.proposals["masks"] = self.proposals.get("masks", 0) + len(duals)
        for candidate in masks.of_duals(duals, self.found):
            if not self._left:
                break
            self._take("masks", candidate)

    def _refresh(self) -> None:
        """Compute the duals found once more, now that the others' columns are known.

        A dual is orthogonal to all of them. That leaves few unknowns to its own equations, and the
        duals' errors are what blurs the rest.
        """
        for index, sample in enumerate(self.found):
            others = [other.column for other in self.found if other is not sample]
            if not others:
                return
            known = torch.stack(others, 1)
            free = torch.linalg.qr(known, mode="complete").Q[:, len(others) :]
            dual: Tensor | None = None
            if self._features is not None:
                dual = self._solved(sample.outputs > 0, self.layer.projected @ free)
            elif self.layer.takes_input or self.layer.sparse_inputs:
                right = self.layer.right
                zeros = zero_entries(sample.dual @ right, self.layer.factor.rank)
                if zeros is not None:
                    dual, _ = null_vector((right.T @ free)[zeros])
            if dual is None:
                continue
            better = self.layer.check(free @ dual, sample.label)
            if better is not None and better.misfit <= max(2 * sample.misfit, self._noise(better)):
                self.found[index] = better
        self._following_duals.clear()
        self._following_columns.clear()
        for sample in self.found:
            self._follow(sample)
        self._rest = self._remainder()
        self._lifted = torch.inf

    @staticmethod
    def _noise(candidate: Candidate) -> float:
        return EXACT * candidate.expected + ROUNDING

    def _follow(self, candidate: Candidate) -> None:
        """Note the sample's dual and column in the next layer's gradient."""
        if self.following is None or not self._linked:
            return
        behind = self.following
        inputs = candidate.outputs.clamp_min(0)
        dual = torch.linalg.lstsq(behind.factor.right.T, inputs[:, None]).solution[:, 0]
        labels = torch.tensor([candidate.label], device=inputs.device)
        if behind.alone:
            outputs = behind.matrix @ inputs + behind.offset
            errors = behind.errors(outputs[None], labels)[0]
        else:
            errors = self.layer.gradient_behind(candidate.inputs[None], labels)[behind.bias]
        self._following_duals.append(dual / (dual @ behind.factor.bias))
        self._following_columns.append(errors @ behind.factor.left)

    def _remainder(self) -> _Rest:
        layer, behind = self.layer, self.following
        if self.found:
            duals = torch.stack([sample.dual for sample in self.found])
            columns = torch.stack([sample.column for sample in self.found], 1)
            factor, lift = layer.factor.remainder(duals, columns)
        else:
            factor, lift = layer.factor, torch.eye(layer.factor.rank).to(layer.factor.left)
        if behind is None:
            return _Rest(layer, factor, lift, None, None)
        rest = behind.factor
        if self._following_duals:
            rest, _ = rest.remainder(
                torch.stack(self._following_duals), torch.stack(self._following_columns, 1)
            )
        features = torch.linalg.qr(rest.right.T).Q if self._linked else None
        errors = behind.matrix.T @ rest.left if behind.alone else None
        return _Rest(layer, factor, lift, errors, features)
