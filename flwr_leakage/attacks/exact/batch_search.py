"""Search for the samples behind a linear layer's gradient, one after another.

The gradient ``∂L/∂W = S H`` of a layer ``z = W h + c`` is known as a product U R of rank b, the
number of samples. Column i of S = U Q is sample i's error ∂L/∂z, and row i of H = T R is its input
h, with T = Q⁻¹. A row t of T is a sample's *dual*
(:class:`~flwr_leakage.attacks.network.linear.LayerFactor`). Every sample found is removed from
these equations, which makes the remaining samples easier to find.

A *proposal* is a dual, which gives a candidate ``t R`` for a sample's input. It comes from one of
these sources:

* ``peeling``: if one sample alone activates a unit, the unit's gradient is that sample's input
  (Cascading: Shariati and Alambardar 2026);
* ``errors``: a sparse vector in the span of S gives a mask, which says which units a sample
  activates;
* ``features``: a sparse nonnegative vector in the span of the next layer's inputs gives a mask;
* ``inputs``: a sparse nonnegative vector in the span of the layer's own inputs (outputs of a ReLU,
  or images with black pixels) is itself a sample's input;
* ``masks``: if the next layer gives the logits, a mask determines a sample's errors, and these
  correct the mask. The first mask is that of a unit's gradient, a mixture of the samples that
  activate the unit. The last one is the mask of one of these samples.

*Closure* turns a mask into an input. The next layer's inputs a lie in the span of the next gradient
and are zero outside of the mask, which determines a up to its length. On the mask, the layer's
outputs equal a, which determines t. The outputs that t gives correct the mask, until it no longer
changes. The network behind the layer judges every proposal (``BatchLayer.check``).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.batch_layer import ZERO_SHARE, BatchLayer, BatchSample
from flwr_leakage.attacks.exact.batch_masks import MaskColumns, null_vector, sparsest, zero_entries
from flwr_leakage.attacks.network.linear import LayerFactor
from flwr_leakage.attacks.rounding import FLOAT64_MISFIT, SPARE_EQUATIONS
from flwr_leakage.values import require

ROW_START_SHARE = 0.75
"""Probability that the search for a sparse vector, which may show a sample, starts at a random row
of the gradient's left factor U (``LayerFactor.left``) rather than at a Gaussian vector (chosen on
development draws; no results are kept)."""

ONE_SAMPLE_MISFIT = 0.1
"""If a unit's gradient is taken as the input of one sample, the ∂L/∂z by the layer's outputs z that
this sample would have lies partly outside the span of the gradient. If this part is larger than the
given share of its length, several samples activate the unit (chosen on development draws; no
results are kept)."""

LAST_ATTEMPTS = 5
"""Number of attempts to read the last missing sample off the remaining gradient. Each attempt looks
for wrongly assumed states of units at other random points. More attempts only take longer."""


@dataclass(frozen=True)
class SearchSettings:
    """Limits of the search for the samples behind a layer's gradient.

    Attributes:
        starts: the largest number of random starts of the search for a sparse vector or for masks.
        max_seconds: CPU seconds after which no further start is made.
    """

    starts: int = 3000
    max_seconds: float = 60.0

    def __post_init__(self) -> None:
        require(self, "be at least 1", "starts")
        require(self, "be at least 0", "max_seconds")


@dataclass(frozen=True)
class _Rest:
    """The factors of a layer's gradient without the samples that are found already.

    A sample's *dual* is the row vector t for which its input of the layer is t R.

    Attributes:
        layer: the attacked layer.
        factor: the factors ``U [R, β]`` of the gradient of the r samples that remain.
        lift: C (r, b), which maps a dual t (r,) of these factors to one, t C, of the whole
            gradient.
        features: an orthonormal basis (m, r) of the next layer's inputs for the remaining samples,
            or ``None`` if the next layer's gradient has another rank.
    """

    layer: BatchLayer
    factor: LayerFactor
    lift: Tensor
    features: Tensor | None

    @cached_property
    def live(self) -> Tensor:
        """Booleans (m,), true for units of the layer that a sample not yet found activates."""
        sizes = self.factor.left.norm(dim=1)
        return sizes > ZERO_SHARE * sizes.max()

    @cached_property
    def projected(self) -> Tensor:
        """The product ``W Rᵀ`` (m, r) of the layer's weights and the right factor R (r, n).

        R belongs to the gradient of the r samples that are not found yet. The input of such a
        sample is t R, where t is its dual. The product maps t to the layer's outputs without the
        bias.
        """
        return self.layer.projected @ self.lift.T

    @cached_property
    def pixels(self) -> Tensor:
        """The right factor's transpose Rᵀ (n', r) of the gradient of the r samples that remain.

        It is shifted so that an entry without signal is zero, and only n' entries of the layer's
        input are kept; see :meth:`BatchLayer.in_pixels`.
        """
        return self.layer.in_pixels(self.factor.right, self.factor.bias).T

    @cached_property
    def orthonormal(self) -> tuple[Tensor, Tensor]:
        """The QR factors (n', r) and (r, r) of :attr:`pixels`.

        The r columns of ``pixels`` are mixtures of the inputs of samples not yet found.
        """
        basis, triangle = torch.linalg.qr(self.pixels)
        return basis, triangle


class BatchSearch:
    """Search for the samples behind one linear layer's gradient.

    Args:
        layer: the layer whose gradient is split into samples.
        following: the layer whose inputs are the ReLU of this layer's outputs, or ``None``.
        settings: the limits of the search.
        generator: the random stream for all random starts.

    Attributes:
        found: the samples found so far.
        proposals: how many samples each source has proposed, by the name of the source.
        accepted: how many of the proposed samples were accepted, by the name of the source.
        scale: the factor by which the client scaled its update, if the search looked for one and
            samples show it, else ``None``.
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
        self.found: list[BatchSample] = []
        self.proposals: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self.scale: float | None = None
        self._following_duals: list[Tensor] = []
        self._following_columns: list[Tensor] = []
        # These samples are true except for the size of their predicted errors ∂L/∂z. The size shows
        # by which factor the client scaled its update.
        self._scaled: list[BatchSample] = []
        # The next layer's gradient spans that layer's inputs only if the samples' errors there have
        # full rank, as equal ranks of both gradients show.
        self._linked = following is not None and following.factor.rank == layer.factor.rank
        self._features = following.factor.right.T if following and self._linked else None
        self._masks = None if self._linked else MaskColumns.posed(layer, following)
        self._rest = self._remainder()
        self._peeled = torch.zeros_like(layer.factor.left)  # each unit's dual at the last peeling
        self._misfits = torch.full_like(layer.offset, torch.inf)  # misfits of the units' duals

    def run(self, scaled: bool = True) -> list[BatchSample]:
        """Return the samples that the search has found when it ends.

        The search ends when all samples are found, when its limits are reached, or when no way to
        propose samples applies. ``scaled`` tells whether the client may have scaled its update by
        an unknown factor. If so, the search also ends once candidates agree on the factor
        (:attr:`told_scale`), which must be divided out first.
        """
        budget = Budget.of(self.settings.max_seconds)
        sources = self._sources()
        peeled = -1  # number of samples found before the last peeling
        for _ in range(self.settings.starts):
            # Peeling takes each unit's gradient for the input of one sample. If other sources find
            # masks, too, many samples share each unit. Then peeling runs once, and again after a
            # new sample only if peeling has found a sample before.
            rarely = self._linked or self._masks is not None
            pays = not rarely or peeled < 0 or "peeling" in self.accepted
            if len(self.found) > peeled and self.layer.rectified and pays:
                self._peel(budget)
                peeled = len(self.found)
            if not sources:
                break
            self.scale = self.told_scale if scaled else None
            if self._left <= 1 or budget.is_spent or self.scale is not None:
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
        for _ in range(LAST_ATTEMPTS):
            if self._left == 1:  # the remaining gradient belongs to the last sample alone
                self._judge("last", self.layer.factor.bias.new_ones(1))
        if self._left == 1:  # nearly dependent errors leave little of the last sample's gradient
            self._judge("last by zeros", None, self._last_by_zeros())
        if scaled and self.scale is None:
            self.scale = self.told_scale  # before samples that are not exact are dropped
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
        return sources + ["inputs"] * (layer.takes_input or layer.sparse_inputs)

    def _propose(self, source: str) -> None:
        """Make one proposal of a sample from a random start, and judge it.

        ``source`` is the kind of vectors among which a sparse vector is sought: ``errors``, the
        derivatives of the samples' losses by the layer's outputs; ``features``, the next layer's
        inputs; or ``inputs`` of the layer.
        """
        rest, rank = self._rest, self._left
        active = rest.factor.left[rest.live]
        row = active[int(torch.randint(len(active), (), generator=self.generator))]
        noise = torch.randn(rank, generator=self.generator, dtype=torch.float64).to(row)
        from_row = float(torch.rand((), generator=self.generator)) < ROW_START_SHARE
        start = row if from_row else noise
        dual: Tensor | None = None
        if source == "inputs":
            basis, triangle = rest.orthonormal
            vector = sparsest(basis, triangle @ start, nonnegative=True)
            zeros = zero_entries(basis @ vector, rank)
            if zeros is not None:
                dual, _ = null_vector(rest.pixels[zeros])
        else:
            if source == "errors":
                live, values = rest.live, active @ sparsest(active, start)
            else:
                assert rest.features is not None
                # ``live`` marks the units that at least one remaining sample activates. Zeros of
                # other units say nothing about a mask.
                live = rest.features.abs().amax(1) > ZERO_SHARE
                values = (rest.features @ sparsest(rest.features, noise, nonnegative=True))[live]
            zeros = zero_entries(values, rank)
            if zeros is not None:
                mask = live.clone()
                mask[live] = ~zeros
                dual = self._close(mask)
        self._judge(source, dual)

    def _close(self, mask: Tensor) -> Tensor | None:
        """Return the dual t (r,) of the sample with a given mask, or None if it is not determined.

        The mask (m,) is true for units that the sample activates. The sample's input is t R, where
        R is the right factor of the gradient of the samples that are not found yet. The outputs
        that t gives correct the mask, up to six times.
        """
        assert self._features is not None
        features, offset = self._features, self.layer.offset
        dual = None
        for _ in range(6):
            if int((~mask).sum()) < features.shape[1] or int(mask.sum()) < self._left + 2:
                return None
            dual = self._solved(mask, self._rest.projected)
            corrected = self._rest.projected @ dual + offset > 0
            if torch.equal(corrected, mask):
                break
            mask = corrected
        return dual

    def _solved(self, mask: Tensor, projected: Tensor) -> Tensor:
        """Return a sample's dual t (r,), solved on the mask of the units that the sample activates.

        Let h = t R be the layer's input, where R is the right factor of the gradient of samples not
        found yet, and let a (m,) be the ReLU of its outputs, which the next layer takes. Here a
        lies in a span that the next layer's gradient shows, and is zero outside of the mask (m,),
        the units that the sample activates. So a is known up to a factor λ. The equations
        ``W h + c = λ a`` on the mask give t and λ. ``projected`` is W Rᵀ (m, r).
        """
        assert self._features is not None
        mixture, _ = null_vector(self._features[~mask])
        outputs = self._features @ mixture
        # The equations W h + c = λ a on the mask are solved for the dual of h and for λ. ``share``
        # brings the column of λ to the size of those of the dual.
        share = projected.norm() / outputs.norm()
        equations = torch.cat([projected[mask], -share * outputs[mask, None]], dim=1)
        offset = -self.layer.offset[mask, None]
        return torch.linalg.lstsq(equations, offset).solution[:-1, 0]

    def _peel(self, budget: Budget) -> None:
        """Judge every unit's gradient as the input of one sample, and add the confirmed samples.

        If two samples activate a unit, its gradient shows one of them once the other is found. So a
        few samples from other sources may lead to many. A unit may seem to have one sample if the
        derivative of a second sample's loss is small there. The input from that unit is not exact,
        and would spoil the remaining equations. So each round takes only the units whose gradients
        fit one sample best, with a misfit (:meth:`BatchLayer.misfits`) near the least. No round
        begins once the budget is spent.
        """
        while self._left > 1 and not budget.is_spent:
            rest = self._rest
            duals = rest.factor.left @ rest.lift
            duals = duals / duals.norm(dim=1, keepdim=True).clamp_min(1e-300)
            # If no sample found since the last peeling activates a unit, the unit's dual has not
            # moved, and its misfit is not computed anew.
            moved = (duals - self._peeled).norm(dim=1) > 1e-9
            self._misfits[moved] = torch.inf
            # A unit that is not active under the input that its own dual gives is not tried.
            outputs = (self.layer.projected * duals).sum(1) / (duals @ self.layer.factor.bias)
            is_active = outputs + self.layer.offset > 0
            tried = (moved & rest.live & is_active).nonzero()[:, 0]
            if len(tried):
                self._misfits[tried] = self.layer.misfits(duals[tried])
            self._peeled = duals
            before = len(self.found)
            while len(self.found) == before:
                least = float(self._misfits.min())
                if least > ONE_SAMPLE_MISFIT:
                    return
                limit = min(max(10 * least, FLOAT64_MISFIT), ONE_SAMPLE_MISFIT)
                for unit in (self._misfits <= limit).nonzero()[:, 0].tolist():
                    if self._left:
                        self._judge("peeling", None, duals[unit])
                    self._misfits[unit] = torch.inf

    def _judge(self, source: str, dual: Tensor | None, whole: Tensor | None = None) -> bool:
        """Add a dual's sample if the network behind the layer confirms it; return whether it did.

        A sample's dual is the vector t for which its input of the layer is t R, with the right
        factor R of a gradient. ``dual`` (r,) belongs to the gradient of the r remaining samples; it
        is ``None`` if the source gave none. ``whole`` (b,), which takes its place if given, belongs
        to the gradient of all b samples. The proposal is counted under ``source``.
        """
        self.proposals[source] = self.proposals.get(source, 0) + 1
        if whole is None:
            if dual is None:
                return False
            whole = dual @ self._rest.lift
        candidate = self.layer.check(whole)
        if candidate is not None:
            candidate = self._passed(candidate)
        if candidate is None:
            return False
        self._take(source, candidate)
        return True

    def _take(self, source: str, candidate: BatchSample) -> None:
        """Add a sample to those found, and remove its part from the layer's gradient.

        The sample is counted as accepted under the name of the source that proposed it.
        """
        self.found.append(candidate)
        self.accepted[source] = self.accepted.get(source, 0) + 1
        if self._left:
            self._follow(candidate)
            self._rest = self._remainder()

    def _last_by_zeros(self) -> Tensor | None:
        """Return the dual t (b,) of the last missing sample, or None without enough zeros.

        The sample's input is t R, where R is the right factor of the layer's gradient. The zeros of
        the input determine t.
        """
        layer = self.layer
        if not (layer.takes_input or layer.sparse_inputs):
            return None
        dual = self._rest.lift[0]
        for _ in range(LAST_ATTEMPTS):
            zeros = zero_entries(dual @ layer.right, layer.factor.rank)
            if zeros is None:
                return None
            dual, _ = null_vector(layer.right.T[zeros])
        return dual

    def _is_known(self, dual: Tensor, samples: list[BatchSample]) -> bool:
        """Return whether a dual (b,), of any length, belongs to one of the given samples.

        The dual t of a sample gives its input t R, where R is the right factor of the layer's
        gradient. A sample's column holds the coordinates of its ∂L/∂z in the gradient's span. The
        dual is orthogonal to the columns of all other samples, and far from orthogonal to the
        sample's own.
        """
        scale = float(dual @ self.layer.factor.bias)
        return any(
            abs(float(dual @ other.column)) > 0.5 * abs(scale * float(other.dual @ other.column))
            for other in samples
        )

    def _passed(self, candidate: BatchSample) -> BatchSample | None:
        """Return a candidate sample, maybe repaired, or None if it is known or not confirmed.

        A sample in ``found`` is known. A candidate is confirmed if noise alone explains the misfit
        of its ∂L/∂z to the gradient; for a repair see :meth:`BatchLayer.repaired`. A candidate that
        is only nearly right would spoil the equations of all later samples.
        """
        told = None if self._masks is None else self._masks.of_candidate(candidate, self.found)
        if told is not None:
            return told
        if self._is_scaled(candidate) and not self._is_known(candidate.dual, self._scaled):
            self._scaled.append(candidate)
        # A true sample with one unit in the wrong state has a misfit of at most 0.6. Most wrong
        # candidates have more, and are dropped before a repair, which takes passes.
        if max(candidate.misfit, candidate.scale_error) > 0.6:
            return None
        if self._is_known(candidate.dual, self.found):
            return None
        if not candidate.is_exact:
            candidate = self.layer.repaired(candidate, self.generator)
        is_exact = candidate.is_exact
        # If masks are used and none confirms the candidate, its misfit must be within the limit for
        # masks, too, which allows less rounding than ``is_exact``.
        if self._masks is not None:
            is_exact = is_exact and candidate.misfit <= self._masks.limit(candidate.expected)
        return candidate if is_exact else None

    def _is_scaled(self, candidate: BatchSample) -> bool:
        """Return whether a candidate is a true sample except for the size of its errors.

        The errors of a true sample have another size than the gradient shows if the client scales
        its update by a factor. Their direction does not change.
        """
        is_sample = self.layer.surplus >= SPARE_EQUATIONS and candidate.is_aligned
        return is_sample and not candidate.is_exact

    @property
    def told_scale(self) -> float | None:
        """The factor by which the client scaled its update, or None if no samples show it.

        The errors that the network predicts for a true sample lie in the gradient's span at any
        factor. Only their size shows the factor. At least two samples, if there are several, must
        agree on it to a thousandth.
        """
        told = self._scaled or [each for each in self.found if self._is_scaled(each)]
        scales = [1 / float(each.column @ each.dual) for each in told]
        if len(scales) < min(2, self.layer.factor.rank):
            return None
        least, most = min(scales), max(scales)
        return least if 0 < most <= 1.001 * least else None

    def _from_units(self, masks: MaskColumns) -> None:
        """Add the samples to which the masks of 32 random units lead.

        A unit's gradient is taken as the input of one sample, and the units that this input
        activates are the mask from which ``masks`` searches for a sample.
        """
        rest = self._rest
        live = rest.live.nonzero()[:, 0]
        drawn = torch.randint(len(live), (32,), generator=self.generator)
        duals = rest.factor.left[live[drawn]] @ rest.lift
        self.proposals["masks"] = self.proposals.get("masks", 0) + len(duals)
        for candidate in masks.of_duals(duals, self.found):
            if not self._left:
                break
            self._take("masks", candidate)

    def _follow(self, candidate: BatchSample) -> None:
        """Note a found sample's part of the next layer's gradient, to remove it from there, too.

        The notes are the sample's dual, which gives the next layer's input, and its column, which
        holds the coordinates of its error there in the span of that gradient.
        """
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
        if behind is None or not self._linked:
            return _Rest(layer, factor, lift, None)
        rest = behind.factor
        if self._following_duals:
            rest, _ = rest.remainder(
                torch.stack(self._following_duals), torch.stack(self._following_columns, 1)
            )
        return _Rest(layer, factor, lift, torch.linalg.qr(rest.right.T).Q)
