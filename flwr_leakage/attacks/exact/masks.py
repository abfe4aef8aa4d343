"""Where the ReLUs before a layer were active, with a proof for each channel that has one.

The weight gradient of a layer is linear in its input a, and leaves it open in some directions. If
a comes from ReLUs it is nonnegative and partly zero. Mostly it then is a vertex of the polytope of
nonnegative solutions, often the one of least sum; or it is the solution nearest to a candidate.
Whether that is right is told by the bias b of the layer ``W ∗ x + b`` that made a. With e the
errors of that layer's outputs where they are active, known from the layers behind,

    ∂L/∂b_o = Σ_p e_op [a_op > 0]

is one equation for each channel o that the right mask meets to rounding, and a wrong one by
accident only, as the entries of e are of all sizes. Where thousands of masks are tried, accidents
happen; so a mask must also explain the layer's own weight gradient, which is linear in x, better
than the candidate's mask does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from flwr_leakage.attacks.exact.layer_equations import Whitened

Array = np.ndarray

SMALLEST, LARGEST = 1e-6, 3e-2
"""Entries may count as zero up to a threshold between these shares of their channel's largest."""

SUM_WEIGHT = 1e-4
"""Of the sum's row beside the orthonormal rows of the equations."""

OPEN = 0.02
"""Entries count as open from this share on that the equations leave undetermined."""

NOISE = 2e-7
"""Relative error of gradients in float32."""

UNSEEN = 1e-6
"""No equation sees a position if its column is below this share of the largest singular value."""

INEXACT = 1e-3
"""Values are determined if their standard deviation is below this share of typical ones."""

DOUBTFUL = 1e-2
"""Share of its channel's largest entry up to which an entry of a solution may be zero."""

FLIPPABLE, MOST_FLIPS = 24, 3
"""Entries of a mask that are tried, and how many at once. A wrong mask passes the bias's gradient
once in 1e5 times or so, and about 7,000 are tried for a channel."""

WORTH = 0.9
"""Share to which a mask must lower the misfit to the weights' gradient for every entry in which it
differs from the candidate's. Right ones mostly lower it to a half or so; wrong ones, that differ in
three entries or more, to 0.8 at best."""

FLIPS = [
    np.array(list(combinations(range(FLIPPABLE), n)), dtype=int) for n in range(MOST_FLIPS + 1)
]
"""Ranks of entries that are flipped, by their number: (⋅, number) each."""

PROJECTIONS = 200
"""Of a candidate onto the equations' solutions."""


@dataclass(frozen=True)
class Masks:
    """An estimate of a ReLU layer's outputs a, of C channels with P entries.

    Attributes:
        features: a (C, P), zero where inactive.
        active: [a > 0] (C, P).
        certain: (C,), whether the bias's gradient proves the mask of a channel.
    """

    features: Tensor
    active: Tensor
    certain: Tensor


@dataclass(frozen=True)
class MaskSearch:
    """The search for the masks of one layer of ReLUs.

    Attributes:
        equations: those that the weight gradient of the layer behind states about a.
        errors: of the outputs of the layer that made a, where active (C, P).
        bias_gradient: ∂L/∂b (C,).
        weight_gradient: ∂L/∂W (C, K), with K weights of a channel.
        tolerance: how far sums may miss, as a share of Σ_p |e_op|. Right masks miss by 1e-8 to
            1e-7 with float32 gradients; of those within 2e-7 a few are wrong.
    """

    equations: Whitened
    errors: Tensor
    bias_gradient: Tensor
    weight_gradient: Tensor
    tolerance: float
    _settled: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of proven channels, which stay as they are."""

    @cached_property
    def is_open(self) -> Tensor:
        """Entries (P,) of each channel's mask that the equations leave open."""
        if self.equations.is_determined:
            return torch.zeros(self.errors.shape[1], dtype=torch.bool)
        return self.equations.open_share() > OPEN

    def begin(self) -> Masks:
        """Vertices of least sum, cut where the bias's gradient says."""
        features = torch.zeros_like(self.errors)
        active = torch.zeros_like(self.errors, dtype=torch.bool)
        certain = torch.zeros(len(features), dtype=torch.bool)
        for channel in range(len(features)):
            solution = self._least_sum(channel)
            largest = float(solution.max())
            fewest = int((solution > LARGEST * largest).sum())
            most = int((solution > SMALLEST * largest).sum())
            mask, proven = self._cut(channel, np.argsort(-solution), fewest, most)
            features[channel] = torch.from_numpy(solution * mask)
            active[channel] = torch.from_numpy(mask)
            certain[channel] = proven
        return Masks(features, active, certain)

    def refine(self, masks: Masks, preactivations: Tensor, patches: Tensor) -> Masks:
        """Try to prove more channels, with a candidate at hand.

        The nonnegative solution of the equations that is nearest to the candidate's outputs is
        ordered and cut; and masks are tried that differ in up to three doubtful entries from its
        mask, from the candidate's, and from the latter where the equations leave a mask open.
        Of those that the bias's gradient proves, the one is taken that explains the weights'
        gradient best, if the entries that differ from the candidate's mask are worth it.

        Args:
            masks: what is believed so far; what is proven stays.
            preactivations: of the ReLUs (C, P), at the candidate.
            patches: of the candidate's inputs to the layer (K, P), see ``Link.patches``.
        """
        features, active, certain = (
            t.clone() for t in (masks.features, masks.active, masks.certain)
        )
        channels = (~certain).nonzero()[:, 0]
        solutions = self._nearest(channels, preactivations[channels].clamp_min(0)).numpy()
        for channel, solution in zip(channels.tolist(), solutions, strict=True):
            z = preactivations[channel].numpy()
            misfit = self._misfit(channel, z > 0, patches.numpy())
            mask = min(self._proven(channel, solution, z), key=misfit, default=None)
            certain[channel] = mask is not None and misfit(mask) <= misfit(z > 0)
            mask = mask if certain[channel] else z > 0
            features[channel] = torch.from_numpy(solution.clip(0) * mask)
            active[channel] = torch.from_numpy(mask)
        return Masks(features, active, certain)

    def _proven(self, channel: int, solution: Array, z: Array) -> Iterator[Array]:
        """Masks near a solution of the equations and near a candidate that the bias proves."""
        largest = max(float(solution.max()), float(z.max()), 1e-12)
        fewest = int((solution > LARGEST * largest).sum())
        most = int((solution > -DOUBTFUL * largest).sum())
        mask, proven = self._cut(channel, np.argsort(-solution), fewest, most)
        if proven:
            yield mask
        margins = solution - DOUBTFUL * largest
        for each in (margins, z, np.where(self.is_open.numpy(), z, margins)):
            yield from self._flip(channel, each)

    def _misfit(self, channel: int, first: Array, patches: Array) -> Callable[[Array], float]:
        """How far masks are from explaining a channel's weight gradient with a candidate.

        In units in which a mask that is worth its changes to the candidate's, ``first``, is no
        further off than that one.
        """
        errors, target = self.errors[channel].numpy(), self.weight_gradient[channel].numpy()

        def misfit(mask: Array) -> float:
            distance = float(np.linalg.norm(patches @ (errors * mask) - target))
            return distance * WORTH ** -int((mask != first).sum())

        return misfit

    def settle(self, masks: Masks) -> tuple[Tensor, Tensor]:
        """Proven masks' outputs as exact as the equations tell them, and which are.

        On the support of a proven mask the equations, with their singular values, are solved in
        least squares. The variance of each entry comes from the noise of float32 gradients, and
        from directions in which the equations leave it open.

        Args:
            masks: what is believed.

        Returns:
            Outputs (C, P), new on proven masks. And which entries (C, P) are determined: values
            of active ones; and that others are inactive, in all channels, unless no equation
            sees their position.
        """
        features = masks.features.clone()
        seen, determined = self._seen, self._seen.expand(masks.active.shape).clone()
        for channel in masks.certain.nonzero()[:, 0].tolist():
            support = masks.active[channel]
            if support.any():
                if channel not in self._settled:
                    self._settled[channel] = self._solve(channel, support)
                values, exact = self._settled[channel]
                features[channel, support] = values
                determined[channel, support] = seen[support] & exact
        return features, determined

    @cached_property
    def _seen(self) -> Tensor:
        """Positions (P,) that some equation sees."""
        rows = self.equations.rows * self.equations.singular[:, None]
        return rows.norm(dim=0) > UNSEEN * self.equations.singular[0]

    def _solve(self, channel: int, support: Tensor) -> tuple[Tensor, Tensor]:
        """A channel's values on its support by least squares, and which are determined."""
        raw = self.equations.rows * self.equations.singular[:, None]
        target = self.equations.values[:, channel] * self.equations.singular
        left, singular, right = torch.linalg.svd(raw[:, support], full_matrices=False)
        kept = singular > NOISE * self.equations.singular[0]
        left, singular, right = left[:, kept], singular[kept], right[kept]
        values = right.T @ ((left.T @ target) / singular)
        size = values.square().mean()
        noise = NOISE * target.square().mean().sqrt()
        variance = right.T.square() @ (noise / singular).square()
        variance += (1 - right.square().sum(dim=0)).clamp_min(0) * size
        return values, (variance < INEXACT**2 * size) & (values > 0)

    def _least_sum(self, channel: int) -> Array:
        """The nonnegative solution of a channel's equations with the least sum."""
        values = self.equations.values[:, channel].numpy()
        if self.equations.is_determined:
            return (self.equations.rows.T.numpy() @ values).clip(0)
        rows = self.equations.rows.numpy()
        rows = np.vstack([rows, np.full(rows.shape[1], SUM_WEIGHT)])
        return nnls(rows, np.append(values, 0.0), maxiter=10 * rows.shape[1])[0]

    def _cut(self, channel: int, order: Array, fewest: int, most: int) -> tuple[Array, bool]:
        """The mask of the first entries in ``order`` whose errors come nearest to the bias's.

        Args:
            channel: of the layer.
            order: of entries, likely ones first.
            fewest: least number of active ones among them.
            most: largest number.
        """
        errors = self.errors[channel].numpy()
        mask = np.zeros(len(errors), bool)
        sums = np.append(0.0, errors[order].cumsum())
        gaps = np.abs(sums[fewest : most + 1] - float(self.bias_gradient[channel]))
        best = int(gaps.argmin())
        mask[order[: fewest + best]] = True
        return mask, bool(gaps[best] <= self.tolerance * np.abs(errors).sum())

    def _flip(self, channel: int, margins: Array) -> Iterator[Array]:
        """Proven masks of positive margins with some of the smallest ones turned over.

        Entries without an error stay as they are: neither gradient tells of them.
        """
        errors, mask = self.errors[channel].numpy(), margins > 0
        tolerance = self.tolerance * np.abs(errors).sum()
        gap = errors[mask].sum() - float(self.bias_gradient[channel])
        telling = np.flatnonzero(errors)
        doubtful = telling[np.argsort(np.abs(margins[telling]))[:FLIPPABLE]]
        change = np.where(mask[doubtful], -errors[doubtful], errors[doubtful])
        for ranks in FLIPS:
            ranks = ranks[(ranks < len(doubtful)).all(axis=1)]
            for flips in ranks[np.abs(gap + change[ranks].sum(axis=1)) <= tolerance]:
                flipped = mask.copy()
                flipped[doubtful[flips]] ^= True
                yield flipped

    def _nearest(self, channels: Tensor, outputs: Tensor) -> Tensor:
        """Solutions (C, P) of the equations near outputs (C, P) and nearly nonnegative.

        By Dykstra's alternating projections (Boyle and Dykstra 1986).
        """
        rows, values = self.equations.rows, self.equations.values[:, channels]
        point = outputs.T
        solution = point
        first, second = torch.zeros_like(point), torch.zeros_like(point)
        for _ in range(PROJECTIONS):
            moved = point + first
            solution = moved + rows.T @ (values - rows @ moved)
            first = moved - solution
            point = (solution + second).clamp_min(0)
            second = solution + second - point
        return solution.T
