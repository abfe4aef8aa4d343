"""The outputs a of ReLUs with a known mask, solved from the gradient of the layer behind.

That layer's weight gradient gives equations ``M a = T``. With the mask known, only the active
entries of a are unknown, and they are mostly fewer than the equations. The least-squares solution
is then exact up to the gradient's rounding, and its variance shows how exact each entry is.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.weight_equations import Whitened


@dataclass(frozen=True)
class Masks:
    """An estimate of a ReLU layer's outputs a, of C channels with P entries.

    Attributes:
        features: a (C, P), zero for inactive entries.
        active: the mask [a > 0] (C, P).
        certain: booleans (C,), true for channels whose mask is proven.
        determined: booleans (C, P), true for entries that are known if their channel's mask is
            proven. An active entry then has a known value, otherwise only a known sign. An inactive
            entry is then known to be inactive; otherwise nothing is known about it, as its position
            occurs in no equation.
    """

    features: Tensor
    active: Tensor
    certain: Tensor
    determined: Tensor

    @classmethod
    def unknown(cls, channels: int, positions: int) -> "Masks":
        """Return masks of ``channels`` × ``positions`` entries about which nothing is known."""
        features = torch.zeros(channels, positions, dtype=torch.float64)
        nowhere = torch.zeros(channels, positions, dtype=torch.bool)
        return cls(features, nowhere, nowhere.any(dim=1), nowhere)

    @property
    def num_proven(self) -> int:
        """Number of channels whose mask is proven."""
        return int(self.certain.sum())

    @property
    def valued(self) -> Tensor:
        """Booleans (C, P), true for entries of proven masks whose value is known."""
        return self.active & self.determined & self.certain[:, None]


@dataclass(frozen=True)
class MaskValues:
    """The solver of values on proven masks, with the limits from which they count as known.

    Attributes:
        noise: relative error of the gradients, > 0; the default is float32's rounding. Singular
            values below this share of the largest are left out.
        unseen: a position counts as absent from all equations if the length of its column of M is
            below this share of the largest singular value, ≥ 0.
        precision: a value is determined if its standard deviation is below this share of the root
            mean square of the values, > 0.
    """

    noise: float = 2e-7
    unseen: float = 1e-6
    precision: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("noise", "precision"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        if self.unseen < 0:
            raise ValueError(f"unseen must be at least 0, got {self.unseen}.")

    def settle(self, equations: Whitened, masks: Masks, channels: Tensor) -> Masks:
        """Return the same masks, with the values of some channels solved from the equations.

        Values that the equations do not determine stay as they are.

        Args:
            equations: the equations about a of the layer behind.
            masks: the current estimate of the masks.
            channels: booleans (C,), true for the channels to solve, whose masks count as proven.
        """
        features, determined = masks.features.clone(), masks.determined.clone()
        seen = self.seen(equations)
        for channel in channels.nonzero()[:, 0].tolist():
            support = masks.active[channel]
            determined[channel] = seen
            if support.any():
                values, exact = self.solve(equations, channel, support)
                known = seen[support] & exact
                features[channel, support] = torch.where(known, values, features[channel, support])
                determined[channel, support] = known
        return replace(masks, features=features, determined=determined)

    def seen(self, equations: Whitened) -> Tensor:
        """Return booleans (P,), true for positions that occur in the equations; see ``unseen``."""
        rows = equations.rows * equations.singular[:, None]
        return rows.norm(dim=0) > self.unseen * equations.singular[0]

    def solve(self, equations: Whitened, channel: int, support: Tensor) -> tuple[Tensor, Tensor]:
        """Return a channel's values on a support by least squares, and which are determined.

        The variance of each value comes from the noise of the gradient, and from the directions
        in which the equations leave it open.

        Args:
            equations: the equations about a of the layer behind. They are weighted by their
                singular values, so that all have the same noise.
            channel: the index of the channel of a.
            support: booleans (P,), true for the S active entries of the channel.

        Returns:
            The values (S,), and booleans (S,), true for determined values.
        """
        raw = equations.rows * equations.singular[:, None]
        target = equations.values[:, channel] * equations.singular
        left, singular, right = torch.linalg.svd(raw[:, support], full_matrices=False)
        kept = singular > self.noise * equations.singular[0]
        left, singular, right = left[:, kept], singular[kept], right[kept]
        values = right.T @ ((left.T @ target) / singular)
        size = values.square().mean()
        noise = self.noise * target.square().mean().sqrt()
        variance = right.T.square() @ (noise / singular).square()
        variance += (1 - right.square().sum(dim=0)).clamp_min(0) * size
        return values, (variance < self.precision**2 * size) & (values > 0)
