"""Search for the masks of a layer of ReLUs, and prove them channel by channel.

A mask says which of a channel's units are active. The weight gradient of a layer gives linear
equations for its input a, which mostly have many solutions. If a comes from ReLUs, it is
nonnegative and partly zero. Then a is mostly a vertex of the polytope of the equations' nonnegative
solutions, often the vertex with the least sum. A candidate for the network's input gives another
guess of a by a pass. Each guess gives a guess of the mask [a > 0].

The layer before the ReLUs, ``z = W ∗ h + b`` for an input h, shows whether a mask is right. Let e
be the derivatives of the loss by z as if all units were active. The layers behind determine e. Then

    ∂L/∂b_o = Σ_p e_op [a_op > 0]

is one equation for each channel o with positions p. The right mask meets it up to rounding. As the
entries of e are of all sizes, a wrong mask meets it by chance only. That happens if thousands of
masks are tried. So a mask must also explain the layer's own weight gradient better than the
candidate's mask does.

With the mask known, only the active entries of a are unknown, mostly fewer than the equations. The
least-squares solution is then exact up to the gradient's rounding, and its variance shows how exact
each entry is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from flwr_leakage.attacks.exact.known import Known, Mask
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.rounding import FLOAT32_NOISE

Array = np.ndarray

SMALLEST, LARGEST = 1e-6, 3e-2
"""Limits for the entries of a guess of one channel's ReLU outputs, as shares of the largest entry.
Entries of at most the first limit are taken as zero, and those above the second as active. The
bias's gradient decides about entries between the two. A wider range leaves more masks to try, of
which more are wrong by chance; a narrower one may leave out the right mask."""

SUM_WEIGHT = 1e-4
"""Weight of the row that asks for a sum of zero in a least-squares problem for a ReLU's outputs.
The other rows are linear equations about these outputs, each of length one. The weight is so small
that the sum only decides among solutions of the equations."""

FLIPPABLE, MOST_FLIPS = 24, 3
"""Number of the most doubtful entries of a channel's mask of active ReLUs, which may be flipped,
and the largest number of them that are flipped at once. The most doubtful entries are those whose
ReLU has an input nearest to zero. So Σ_{n ≤ 3} C(24, n) = 2,325 masks are tried for a channel; a
wrong mask meets the bias's gradient about once in 1e5 times. Larger numbers find masks with more
errors, and let more wrong ones pass."""

WORTH = 0.9
"""Factor by which a mask of active ReLUs must lower the distance from the observed weight gradient,
for every entry in which it differs from the mask of a candidate input. A right mask mostly lowers
the distance to about a half of that of the candidate's mask. A wrong mask, which differs in three
entries or more, lowers it to 0.8 at best, while 0.9³ = 0.73 is asked of it."""

NOISE = 2e-7
"""Assumed relative error of float32 gradients. In the equations for the ReLU outputs of one
channel, singular values below this share of the largest are left out."""

PROOF = 5e-8
"""A mask is proven if the sum of the loss's derivatives e_op at its active positions p differs from
the bias's gradient of its channel o by at most this share of Σ_p |e_op|. With float32 gradients,
right masks differ by a share of 1e-8 to 1e-7, and a few wrong ones by less than 2e-7. So a larger
share proves wrong masks, and a smaller one fewer right masks. No table of these shares is kept."""

PRECISION = 1e-3
"""A ReLU's output counts as known if the standard deviation of its error is below this share of the
root mean square of its channel's outputs. A larger share takes less exact outputs for known."""


@dataclass(frozen=True)
class MaskEvidence:
    """The gradients that decide which ReLUs are active, for C channels of P entries.

    Attributes:
        equations: the equations about the ReLUs' outputs a, from the next layer's weight gradient.
        errors: e (C, P), the derivatives ∂L/∂z at the ReLUs' inputs z, as if all units were active.
        bias_gradient: ∂L/∂b (C,) of the layer that computes z.
        weight_gradient: ∂L/∂W (C, K) of the layer that computes z, with K weights per channel.
        proof: tolerance of a mask's proof; see ``PROOF``.
    """

    equations: Whitened
    errors: Tensor
    bias_gradient: Tensor
    weight_gradient: Tensor
    proof: float = PROOF

    def channel(self, number: int) -> "Channel":
        """Return the evidence about the mask of one channel, whose ``number`` counts from 0."""
        errors = self.errors[number].numpy()
        return Channel(
            errors=errors,
            bias_gradient=float(self.bias_gradient[number]),
            weight_gradient=self.weight_gradient[number].numpy(),
            slack=self.proof * float(np.abs(errors).sum()),
        )

    def begin(self) -> Known:
        """Return the facts about the ReLUs' outputs a (C, P) that the gradients alone prove.

        No candidate for the network's input is needed. The guess of a is the only solution of its
        equations, or, if there are several, the nonnegative one with the least sum. Masks are tried
        in which the largest entries of the guess are active; see :meth:`Channel.cut` for their
        proof.
        """
        found: dict[int, tuple[Array, Array]] = {}
        rows = self.equations.rows.numpy()
        weighted = np.vstack([rows, np.full(rows.shape[1], SUM_WEIGHT)])
        for number in range(len(self.errors)):
            values = self.equations.values[:, number].numpy()
            if self.equations.is_determined:
                solution = (rows.T @ values).clip(0)
            else:  # the guess is the nonnegative solution of least sum
                solution, _ = nnls(weighted, np.append(values, 0.0), maxiter=10 * rows.shape[1])
            largest = float(solution.max())
            fewest = int((solution > LARGEST * largest).sum())
            most = int((solution > SMALLEST * largest).sum())
            channel = self.channel(number)
            mask, is_proven = channel.cut(np.argsort(-solution), fewest, most)
            if is_proven:
                found[number] = mask, solution
        return settled(self.equations, Known.nothing(self.errors), found)

    def refine(self, known: Known, preactivations: Tensor, patches: Tensor) -> Known:
        """Return the known facts, with new ones about channels whose masks a candidate helps prove.

        A candidate is an input of the network, with ``preactivations`` (C, P), inputs of the ReLUs,
        and ``patches`` (K, P) of the layer's input (:meth:`Link.patches`). For each channel, masks
        are tried that differ from the candidate's mask in up to ``MOST_FLIPS`` doubtful entries.
        The bias's gradient proves some of them. Of these, the search takes the mask of least
        :meth:`Channel.misfit` to the weights' gradient, if this is at most that of the candidate's
        mask.
        """
        flips, found = sets_of_ranks(), dict[int, tuple[Array, Array]]()
        for number in (~proven_channels(known.mask)).nonzero()[:, 0].tolist():
            channel, z = self.channel(number), preactivations[number].numpy()
            misfit = channel.misfit(z > 0, patches.numpy())
            mask = min(channel.flipped(z, flips), key=misfit, default=None)
            if mask is not None and misfit(mask) <= misfit(z > 0):
                found[number] = mask, z.clip(0)
        return settled(self.equations, known, found)


@dataclass(frozen=True)
class Channel:
    """The evidence about the mask of one channel o of ReLUs with P entries.

    Attributes:
        errors: e_o (P,), the derivatives of the loss by the ReLUs' inputs, as if all were active.
        bias_gradient: ∂L/∂b_o, which is the sum of e_o over the active entries.
        weight_gradient: ∂L/∂W_o (K,) of the layer before the ReLUs.
        slack: largest difference between ∂L/∂b_o and the sum of e_o over the active entries of a
            mask that counts as proven.
    """

    errors: Array
    bias_gradient: float
    weight_gradient: Array
    slack: float

    def cut(self, order: Array, fewest: int, most: int) -> tuple[Array, bool]:
        """Return the mask (P,) of the first n entries in an order, and whether it is proven.

        ``order`` holds the indices (P,) of all entries, from the most to the least likely active
        one. Of the numbers n from ``fewest`` to ``most``, the one is taken for which the sum of the
        loss's derivatives at these entries, ``errors``, is nearest to the bias's gradient. The mask
        is proven if the two differ by at most ``slack``.
        """
        mask = np.zeros(len(self.errors), bool)
        sums = np.append(0.0, self.errors[order].cumsum())
        gaps = np.abs(sums[fewest : most + 1] - self.bias_gradient)
        best = int(gaps.argmin())
        mask[order[: fewest + best]] = True
        return mask, bool(gaps[best] <= self.slack)

    def flipped(self, z: Array, flips: Sequence[Array]) -> Iterator[Array]:
        """Yield proven masks (P,) that differ from a candidate's mask in a few doubtful entries.

        z (P,) are the inputs of the ReLUs at the candidate, whose mask is z > 0. Doubtful are the
        entries of z nearest to zero. An entry at which the loss's derivative is zero is not
        flipped, as no gradient depends on it. Each row of an array of ``flips`` is a set of entries
        to flip, as ranks among the doubtful ones: 0 is the entry nearest to zero. A mask is proven
        if it meets the bias's gradient within ``slack``.
        """
        mask = z > 0
        gap = self.errors[mask].sum() - self.bias_gradient
        telling = np.flatnonzero(self.errors)
        doubtful = telling[np.argsort(np.abs(z[telling]))[:FLIPPABLE]]
        errors = self.errors[doubtful]
        change = np.where(mask[doubtful], -errors, errors)
        for ranks in flips:
            ranks = ranks[(ranks < len(doubtful)).all(axis=1)]
            for chosen in ranks[np.abs(gap + change[ranks].sum(axis=1)) <= self.slack]:
                turned = mask.copy()
                turned[doubtful[chosen]] ^= True
                yield turned

    def misfit(self, first: Array, patches: Array) -> Callable[[Array], float]:
        """Return a function that measures how badly a mask (P,) explains the weight gradient.

        A mask is true for active units. ``first`` (P,) is the mask of a candidate input, and
        ``patches`` (K, P) is the layer's input at the candidate. The function's value is the
        logarithm of the distance between the observed gradient and the one that the candidate has
        with the mask, plus ``−log(WORTH)`` > 0 for every entry in which the mask differs from
        ``first``. So a mask is worth its changes if its value is at most that of ``first``.
        """

        def misfit(mask: Array) -> float:
            distance = patches @ (self.errors * mask) - self.weight_gradient
            changes = int((mask != first).sum())
            # A size of at least 1e-300 keeps the logarithm finite.
            size = max(float(np.linalg.norm(distance)), 1e-300)
            return math.log(size) - changes * math.log(WORTH)

        return misfit


def proven_channels(mask: Mask) -> Tensor:
    """Return booleans (C,), true for channels of a mask (C, P) with a unit of known state.

    :func:`settled` sets the states of a channel's units only if the channel's mask is proven. A
    unit that is in no equation may stay of unknown state even then.
    """
    return ~mask.open.all(dim=1)


def sets_of_ranks() -> list[Array]:
    """Return all sets of up to ``MOST_FLIPS`` ranks of entries to flip in a mask.

    Rank 0 is the entry whose ReLU's input is nearest to zero; ranks are below ``FLIPPABLE``. There
    is one array for each size n = 0, 1, …, with one set of n ranks in each row.
    """
    sets = [list(combinations(range(FLIPPABLE), n)) for n in range(MOST_FLIPS + 1)]
    return [np.array(each, dtype=int).reshape(len(each), n) for n, each in enumerate(sets)]


def settled(equations: Whitened, known: Known, found: Mapping[int, tuple[Array, Array]]) -> Known:
    """Return the facts about a ReLU's outputs a (C, P) after new proofs of some channels' masks.

    A mask (P,) is true where an output of the channel is not 0. ``equations`` about a come from the
    weight gradient of the layer that takes a. ``found`` maps the number of each newly proven
    channel to its mask and to guesses (P,) of its outputs, which are used where the equations do
    not determine an output. ``known`` are the facts so far; those about all other channels stay.
    """
    values, bounds = known.values.clone(), known.bounds.clone()
    on, off = known.mask.on.clone(), known.mask.off.clone()
    seen = (equations.rows * equations.singular[:, None]).norm(dim=0)
    seen = seen > FLOAT32_NOISE * equations.singular[0]  # false if an entry is in no equation
    for channel, (mask, guess) in found.items():
        active, told = torch.from_numpy(mask), seen.clone()
        # An inactive entry that is in no equation is neither on nor off: its state stays unknown.
        on[channel], off[channel] = active, ~active & seen
        values[channel] = torch.from_numpy(guess * mask)
        if mask.any():
            solved, exact = channel_values(equations, channel, active)
            told[active] &= exact
            values[channel, active & told] = solved[told[active]]
        bounds[channel] = torch.where(told, 0.0, torch.inf)
    return Known(values, bounds, Mask(on, off))


def channel_values(equations: Whitened, channel: int, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return a channel's S values at its active entries by least squares, and which are exact.

    ``active`` (P,) is true for the S entries that are solved; the other entries are zero. The
    equations about the channel's P values come from a weight gradient. The variance of each value
    comes from the noise of that gradient, and from the directions that the equations do not
    determine. The second result (S,) is true for positive values whose standard deviation is below
    ``PRECISION`` times the root mean square of the S values.
    """
    raw = equations.rows * equations.singular[:, None]
    target = equations.values[:, channel] * equations.singular
    left, singular, right = torch.linalg.svd(raw[:, active], full_matrices=False)
    kept = singular > NOISE * equations.singular[0]
    left, singular, right = left[:, kept], singular[kept], right[kept]
    values = right.T @ ((left.T @ target) / singular)
    size = values.square().mean()
    noise = NOISE * target.square().mean().sqrt()
    variance = right.T.square() @ (noise / singular).square()
    variance += (1 - right.square().sum(dim=0)).clamp_min(0) * size
    return values, (variance < PRECISION**2 * size) & (values > 0)
