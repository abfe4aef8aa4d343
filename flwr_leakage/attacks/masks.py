"""Where the ReLUs before a layer were active, with a proof for each channel that has one.

The weight gradient of a layer is linear in its input a, and leaves it open in some directions. If
a comes from ReLUs it is nonnegative and partly zero. Mostly it then is a vertex of the polytope of
nonnegative solutions, and vertices are found as solutions of least weighted sum. Which of them is
right is told by the bias b of the layer ``W ∗ x + b`` that made a. With e the errors of that
layer's outputs where they are active, known from the layers behind,

    ∂L/∂b_o = Σ_p e_op [a_op > 0]

is one equation for each channel o that the right mask meets to rounding, and a wrong one by
accident only, as the entries of e are of all sizes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import lsq_linear, nnls
from torch import Tensor

from flwr_leakage.attacks.layer_equations import Whitened

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

PRIOR_WEIGHT = 0.1
"""Of a mask's former guess in its regression, where the residual is relative."""


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
        tolerance: how far sums may miss, as a share of Σ_p |e_op|. Right masks miss by 1e-8 to
            1e-7 with float32 gradients; of those within 2e-7 a few are wrong.
    """

    equations: Whitened
    errors: Tensor
    bias_gradient: Tensor
    tolerance: float

    @property
    def is_open(self) -> Tensor:
        """Entries (P,) of each channel's mask that the equations leave open."""
        if self.equations.is_determined:
            return torch.zeros(self.errors.shape[1], dtype=torch.bool)
        return self.equations.open_share() > OPEN

    def begin(self, tries: int, generator: torch.Generator) -> Masks:
        """Vertices of least sum, at first of equal and then of random weights, up to a proof."""
        count, positions = self.errors.shape
        features = torch.zeros_like(self.errors)
        active = torch.zeros_like(self.errors, dtype=torch.bool)
        certain = torch.zeros(count, dtype=torch.bool)
        for channel in range(count):
            for attempt in range(tries):
                weights = np.ones(positions)
                if attempt:
                    draws = torch.rand(positions, generator=generator, dtype=torch.float64)
                    weights = 0.02 + 0.98 * draws.numpy()
                solution = self._least_sum(channel, weights)
                mask, proven = self._cut(channel, np.argsort(-solution), *_range(solution))
                if proven or not attempt:
                    features[channel] = torch.from_numpy(solution * mask)
                    active[channel] = torch.from_numpy(mask)
                    certain[channel] = proven
                if proven or self.equations.is_determined:
                    break
        return Masks(features, active, certain)

    def refine(
        self, masks: Masks, preactivations: Tensor, patches: Tensor, weight_gradient: Tensor
    ) -> Masks:
        """Try to prove more channels, with a candidate input at hand.

        Entries that look active with the candidate weigh less in the sum; and where the equations
        leave a mask open it is regressed: the weight gradient of the layer that made a is
        ``∂L/∂W_o = Σ_p e_op [a_op > 0] patch_p``, with the candidate's patches.

        Args:
            masks: what is believed so far; what is proven stays.
            preactivations: of the ReLUs (C, P), at the candidate.
            patches: of the layer that made a (K, P), at the candidate.
            weight_gradient: of that layer (C, K).
        """
        features, active, certain = (
            t.clone() for t in (masks.features, masks.active, masks.certain)
        )
        open_entries = self.is_open.numpy()
        largest = max(float(preactivations.max()), 1e-12)
        for channel in (~certain).nonzero()[:, 0].tolist():
            z = preactivations[channel].numpy()
            solution = self._least_sum(channel, 1 / (0.2 + 30 * z.clip(0) / largest))
            mask, proven = self._cut(channel, np.argsort(-solution), *_range(solution))
            if not proven and open_entries.any():
                mask, proven = self._regress(
                    channel,
                    mask,
                    open_entries,
                    z > 0,
                    patches.numpy(),
                    weight_gradient[channel].numpy(),
                )
                solution = np.where(open_entries, z.clip(0), solution)
            features[channel] = torch.from_numpy(solution * mask)
            active[channel] = torch.from_numpy(mask)
            certain[channel] = proven
        return Masks(features, active, certain)

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
        raw = self.equations.rows * self.equations.singular[:, None]
        targets = self.equations.values * self.equations.singular[:, None]
        largest = self.equations.singular[0]
        seen = raw.norm(dim=0) > UNSEEN * largest
        determined = seen.expand(masks.active.shape).clone()
        for channel in masks.certain.nonzero()[:, 0].tolist():
            support, target = masks.active[channel], targets[:, channel]
            if not support.any():
                continue
            left, singular, right = torch.linalg.svd(raw[:, support], full_matrices=False)
            kept = singular > NOISE * largest
            left, singular, right = left[:, kept], singular[kept], right[kept]
            values = right.T @ ((left.T @ target) / singular)
            size = values.square().mean()
            noise = NOISE * target.square().mean().sqrt()
            variance = right.T.square() @ (noise / singular).square()
            variance += (1 - right.square().sum(dim=0)).clamp_min(0) * size
            features[channel, support] = values
            determined[channel, support] &= (variance < INEXACT**2 * size) & (values > 0)
        return features, determined

    def _least_sum(self, channel: int, weights: Array) -> Array:
        """The nonnegative solution of a channel's equations with the least weighted sum."""
        values = self.equations.values[:, channel].numpy()
        if self.equations.is_determined:
            return (self.equations.rows.T.numpy() @ values).clip(0)
        row = SUM_WEIGHT * weights / weights.max()
        rows = np.vstack([self.equations.rows.numpy(), row])
        return nnls(rows, np.append(values, 0.0), maxiter=10 * len(row))[0]

    def _cut(
        self, channel: int, order: Array, fewest: int, most: int, given: Array | None = None
    ) -> tuple[Array, bool]:
        """The mask of the first entries in ``order`` whose errors come nearest to the bias's.

        Args:
            channel: of the layer.
            order: of entries, likely ones first.
            fewest: least number of active ones among them.
            most: largest number.
            given: a mask of others that are active besides.
        """
        errors = self.errors[channel].numpy()
        mask = np.zeros(len(errors), bool) if given is None else given.copy()
        sums = errors[mask].sum() + np.append(0.0, errors[order].cumsum())
        gaps = np.abs(sums[fewest : most + 1] - float(self.bias_gradient[channel]))
        best = int(gaps.argmin())
        mask[order[: fewest + best]] = True
        return mask, bool(gaps[best] <= self.tolerance * np.abs(errors).sum())

    def _regress(
        self,
        channel: int,
        mask: Array,
        open_entries: Array,
        guess: Array,
        patches: Array,
        gradient: Array,
    ) -> tuple[Array, bool]:
        """Open entries of a channel's mask in [0, 1] by least squares, drawn to the guess."""
        given = mask & ~open_entries
        entries = open_entries.nonzero()[0]
        columns = patches * self.errors[channel].numpy()
        size = max(float(np.linalg.norm(gradient)), 1e-30)
        left = np.vstack([columns[:, entries] / size, PRIOR_WEIGHT * np.eye(len(entries))])
        right = np.append(
            (gradient - columns[:, given].sum(1)) / size, PRIOR_WEIGHT * guess[entries]
        )
        shares = lsq_linear(left, right, bounds=(0, 1), method="bvls").x
        order = entries[np.argsort(-shares)]
        found, proven = self._cut(channel, order, 0, len(order), given)
        if not proven:
            found = given
            found[entries[shares > 0.5]] = True
        return found, proven


def _range(solution: Array) -> tuple[int, int]:
    """How many entries are active at least and at most, by the thresholds' range."""
    largest = float(solution.max())
    return int((solution > LARGEST * largest).sum()), int((solution > SMALLEST * largest).sum())
