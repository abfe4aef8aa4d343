"""The search for the masks of a layer of ReLUs, with a proof for each channel that has one.

The weight gradient of a layer gives linear equations for its input a, which leave a open in some
directions. If a comes from ReLUs it is nonnegative and partly zero. It is then mostly a vertex of
the polytope of the equations' nonnegative solutions, often the one of least sum. The solution
nearest to a candidate is another guess. Each guess of a gives a guess of its mask [a > 0].

The bias b of the layer ``W ∗ x + b`` that made a shows whether a mask is right. Let e be the errors
of that layer's outputs as if all were active, which are known from the layers behind. Then

    ∂L/∂b_o = Σ_p e_op [a_op > 0]

is one equation for each channel o. The right mask meets it to rounding. A wrong mask meets it by
accident only, as the entries of e are of all sizes. Such accidents happen if thousands of masks are
tried. So a mask must also explain the layer's own weight gradient, which is linear in x, better
than the candidate's mask does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from flwr_leakage.attacks.exact.mask_values import Masks, MaskValues
from flwr_leakage.attacks.exact.weight_equations import Whitened

Array = np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The gradients that decide about the masks of a ReLU layer of C channels with P entries.

    Attributes:
        equations: the equations about a that the weight gradient of the layer behind states.
        errors: e (C, P), the errors of the outputs of the layer that made a, as if all were active.
        bias_gradient: ∂L/∂b (C,) of that layer.
        weight_gradient: ∂L/∂W (C, K) of that layer, with K weights a channel.
    """

    equations: Whitened
    errors: Tensor
    bias_gradient: Tensor
    weight_gradient: Tensor

    def channel(self, number: int, proof: float) -> "Channel":
        """Return the part about one channel; ``proof`` is the tolerance of ``MaskSearch``."""
        errors = self.errors[number].numpy()
        return Channel(
            errors=errors,
            bias_gradient=float(self.bias_gradient[number]),
            weight_gradient=self.weight_gradient[number].numpy(),
            slack=proof * float(np.abs(errors).sum()),
        )


@dataclass(frozen=True)
class Channel:
    """The part of the evidence that is about one channel o, of P entries.

    Attributes:
        errors: e_o (P,).
        bias_gradient: ∂L/∂b_o.
        weight_gradient: ∂L/∂W_o (K,).
        slack: largest distance of a proven mask's sum of errors from the bias's gradient.
    """

    errors: Array
    bias_gradient: float
    weight_gradient: Array
    slack: float

    def cut(self, order: Array, fewest: int, most: int) -> tuple[Array, bool]:
        """Return the mask of the first n entries in an order, with the n that fits the bias best.

        For this n the sum of the errors is nearest to the bias's gradient.

        Args:
            order: indices (P,) of all entries, from the most to the least likely active one.
            fewest: least n.
            most: largest n.

        Returns:
            The mask (P,), and whether it is proven.
        """
        mask = np.zeros(len(self.errors), bool)
        sums = np.append(0.0, self.errors[order].cumsum())
        gaps = np.abs(sums[fewest : most + 1] - self.bias_gradient)
        best = int(gaps.argmin())
        mask[order[: fewest + best]] = True
        return mask, bool(gaps[best] <= self.slack)

    def flipped(self, margins: Array, flips: Sequence[Array], flippable: int) -> Iterator[Array]:
        """Yield proven masks that differ in a few doubtful entries from that of positive margins.

        The doubtful entries are those with the smallest margins in magnitude, ranked by it.
        Entries of zero error stay as they are, as neither gradient depends on them.

        Args:
            margins: (P,), positive for entries that count as active.
            flips: sets of ranks whose entries are flipped together, see ``MaskSearch.flips``.
            flippable: number of doubtful entries.
        """
        mask = margins > 0
        gap = self.errors[mask].sum() - self.bias_gradient
        telling = np.flatnonzero(self.errors)
        doubtful = telling[np.argsort(np.abs(margins[telling]))[:flippable]]
        errors = self.errors[doubtful]
        change = np.where(mask[doubtful], -errors, errors)
        for ranks in flips:
            ranks = ranks[(ranks < len(doubtful)).all(axis=1)]
            for chosen in ranks[np.abs(gap + change[ranks].sum(axis=1)) <= self.slack]:
                turned = mask.copy()
                turned[doubtful[chosen]] ^= True
                yield turned

    def misfit(self, first: Array, patches: Array, worth: float) -> Callable[[Array], float]:
        """Return a function that measures how badly a mask explains a candidate's weight gradient.

        Its value is the logarithm of the distance of the two gradients, less ``log(worth)`` for
        every entry in which the mask differs from the candidate's own mask. So a mask is worth its
        changes if its value is at most that of the candidate's mask.

        Args:
            first: the candidate's mask (P,).
            patches: patches (K, P) of the layer's input for the candidate.
            worth: see ``MaskSearch``.
        """

        def misfit(mask: Array) -> float:
            distance = patches @ (self.errors * mask) - self.weight_gradient
            changes = int((mask != first).sum())
            size = max(float(np.linalg.norm(distance)), 1e-300)  # keeps the logarithm finite
            return math.log(size) - changes * math.log(worth)

        return misfit


@dataclass(frozen=True)
class MaskSearch:
    """The search for masks, with the limits from which they count as proven.

    Attributes:
        proof: a mask is proven if the sum of its errors misses the bias's gradient by at most this
            share of Σ_p |e_op|, ≥ 0. Right masks miss by 1e-8 to 1e-7 with float32 gradients; a few
            masks within 2e-7 are wrong.
        smallest: entries of the vertex of least sum below this share of their channel's largest
            entry are zero.
        largest: entries above this share are active; 0 ≤ smallest ≤ largest < 1. The bias's
            gradient decides about entries between the two.
        sum_weight: weight of the sum of a's entries beside the equations, whose rows have length
            one, > 0. It is so small that the sum only decides among solutions of the equations.
        open_share: an entry counts as open if the equations leave more than this share of it
            undetermined, in (0, 1].
        doubtful: an entry of a solution is doubtful up to this share of its channel's largest
            entry, in [0, 1).
        flippable: number of entries of a mask that may be flipped, ≥ 0; the most doubtful ones.
        most_flips: largest number of them that are flipped at once, ≥ 0. With 24 and 3 about 7,000
            masks are tried for a channel; a wrong mask passes the bias's gradient about once in 1e5
            times.
        worth: share to which a mask must lower the misfit to the weights' gradient for every
            entry in which it differs from the candidate's mask, in (0, 1]. A right mask mostly
            lowers it to about a half. A wrong mask, which differs in three entries or more, lowers
            it to 0.8 at best.
        projections: number of alternating projections of a candidate onto the equations'
            nonnegative solutions, ≥ 1.
        values: the solver of the values on proven masks.
    """

    proof: float = 5e-8
    smallest: float = 1e-6
    largest: float = 3e-2
    sum_weight: float = 1e-4
    open_share: float = 0.02
    doubtful: float = 1e-2
    flippable: int = 24
    most_flips: int = 3
    worth: float = 0.9
    projections: int = 200
    values: MaskValues = field(default_factory=MaskValues)

    def __post_init__(self) -> None:
        for name in ("proof", "flippable", "most_flips"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.smallest <= self.largest < 1:
            raise ValueError(
                f"smallest and largest must be shares with smallest ≤ largest < 1, got "
                f"{self.smallest} and {self.largest}."
            )
        if not self.sum_weight > 0:
            raise ValueError(f"sum_weight must be above 0, got {self.sum_weight}.")
        for name in ("open_share", "worth"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}.")
        if not 0 <= self.doubtful < 1:
            raise ValueError(f"doubtful must lie in [0, 1), got {self.doubtful}.")
        if self.projections < 1:
            raise ValueError(f"projections must be at least 1, got {self.projections}.")

    def begin(self, evidence: Evidence) -> Masks:
        """Return masks without a candidate: vertices of least sum, cut by the bias's gradient."""
        equations = evidence.equations
        features = torch.zeros_like(evidence.errors)
        active = torch.zeros_like(evidence.errors, dtype=torch.bool)
        certain = torch.zeros(len(features), dtype=torch.bool)
        for channel in range(len(features)):
            solution = self._least_sum(equations, channel)
            largest = float(solution.max())
            fewest = int((solution > self.largest * largest).sum())
            most = int((solution > self.smallest * largest).sum())
            likely = np.argsort(-solution)
            mask, proven = evidence.channel(channel, self.proof).cut(likely, fewest, most)
            features[channel] = torch.from_numpy(solution * mask)
            active[channel] = torch.from_numpy(mask)
            certain[channel] = proven
        determined = self.values.seen(equations).expand(active.shape)
        return self.values.settle(equations, Masks(features, active, certain, determined), certain)

    def refine(
        self, evidence: Evidence, masks: Masks, preactivations: Tensor, patches: Tensor
    ) -> Masks:
        """Return masks in which a candidate has proven more channels.

        For each channel these masks are tried:

        - the mask of the nonnegative solution of the equations nearest to the candidate's outputs,
          with its entries in order and cut by the bias's gradient;
        - masks that differ in up to ``most_flips`` doubtful entries from the mask of that solution,
          from the candidate's mask, or from a mixture of both: the candidate's mask at entries that
          the equations leave open, and the solution's mask elsewhere.

        Among the masks that the bias's gradient proves, the search takes the one that explains the
        weights' gradient best, if its differences from the candidate's mask are worth it.

        Args:
            evidence: the gradients that decide about the masks.
            masks: the current estimate of the masks; proven ones stay.
            preactivations: inputs (C, P) of the ReLUs at the candidate.
            patches: patches (K, P) of the layer's input at the candidate; see ``Link.patches``.
        """
        features, active, certain = (
            t.clone() for t in (masks.features, masks.active, masks.certain)
        )
        equations, flips = evidence.equations, self.flips()
        is_open = self._open(equations)
        channels = (~certain).nonzero()[:, 0]
        outputs = preactivations[channels].clamp_min(0)
        solutions = nearest_solutions(equations, channels, outputs, self.projections).numpy()
        for number, solution in zip(channels.tolist(), solutions, strict=True):
            channel, z = evidence.channel(number, self.proof), preactivations[number].numpy()
            misfit = channel.misfit(z > 0, patches.numpy(), self.worth)
            tried = self._proven(channel, solution, z, is_open, flips)
            mask = min(tried, key=misfit, default=None)
            certain[number] = mask is not None and misfit(mask) <= misfit(z > 0)
            mask = mask if certain[number] else z > 0
            features[number] = torch.from_numpy(solution.clip(0) * mask)
            active[number] = torch.from_numpy(mask)
        found = Masks(features, active, certain, masks.determined)
        return self.values.settle(equations, found, certain & ~masks.certain)

    def flips(self) -> list[Array]:
        """Return all sets of ranks to flip: for n = 0, 1, … an array with one set in each row."""
        sets = [list(combinations(range(self.flippable), n)) for n in range(self.most_flips + 1)]
        return [np.array(each, dtype=int).reshape(len(each), n) for n, each in enumerate(sets)]

    def _proven(
        self,
        channel: Channel,
        solution: Array,
        z: Array,
        is_open: Array,
        flips: Sequence[Array],
    ) -> Iterator[Array]:
        """Yield masks that the bias proves, near a solution of the equations or a candidate."""
        largest = max(float(solution.max()), float(z.max()), 1e-12)
        fewest = int((solution > self.largest * largest).sum())
        most = int((solution > -self.doubtful * largest).sum())
        mask, proven = channel.cut(np.argsort(-solution), fewest, most)
        if proven:
            yield mask
        margins = solution - self.doubtful * largest
        for each in (margins, z, np.where(is_open, z, margins)):
            yield from channel.flipped(each, flips, self.flippable)

    def _open(self, equations: Whitened) -> Array:
        """Return booleans (P,), true for entries that the equations leave open in each channel."""
        if equations.is_determined:
            return np.zeros(equations.num_positions, dtype=bool)
        return (equations.open_share() > self.open_share).numpy()

    def _least_sum(self, equations: Whitened, channel: int) -> Array:
        """Return the nonnegative solution (P,) of a channel's equations with the least sum."""
        values = equations.values[:, channel].numpy()
        if equations.is_determined:
            return (equations.rows.T.numpy() @ values).clip(0)
        rows = equations.rows.numpy()
        rows = np.vstack([rows, np.full(rows.shape[1], self.sum_weight)])
        return nnls(rows, np.append(values, 0.0), maxiter=10 * rows.shape[1])[0]


def nearest_solutions(
    equations: Whitened, channels: Tensor, outputs: Tensor, projections: int
) -> Tensor:
    """Return solutions of a layer's equations that are near given outputs, and nearly nonnegative.

    Dykstra's alternating projections (Boyle and Dykstra 1986) onto the solutions of the equations
    and onto the nonnegative vectors find them. The last projection is onto the solutions, so that
    the equations hold exactly and the signs nearly.

    Args:
        equations: the equations about a.
        channels: indices (N,) of the channels to solve.
        outputs: (N, P) outputs near which the solutions are sought.
        projections: number of projections onto each of the two sets.

    Returns:
        The solutions (N, P).
    """
    rows, values = equations.rows, equations.values[:, channels]
    point = outputs.T
    solution = point
    first, second = torch.zeros_like(point), torch.zeros_like(point)
    for _ in range(projections):
        moved = point + first
        solution = moved + rows.T @ (values - rows @ moved)
        first = moved - solution
        point = (solution + second).clamp_min(0)
        second = solution + second - point
    return solution.T
