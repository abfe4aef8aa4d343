"""Hold the known values of a layer's inputs, and the known states of the ReLU that gives them.

An attack that reads features from a gradient states them in these terms: values with bounds of
their errors, and for the outputs of a ReLU whether each unit is on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flwr_leakage.attacks.rounding import NOISE_DEVIATIONS

T = TypeVar("T")

MARGIN = 3.0
"""Multiple of a sample's most negative estimate of a ReLU's outputs, up to which an estimate counts
as zero. True outputs are not negative, so that negative estimates are noise. A larger multiple
takes more small outputs for zeros, and a smaller one more noise for outputs. No measurement is
kept."""


@dataclass(frozen=True)
class Mask:
    """The states of a ReLU's units, of which each is on, off, or open, which means unknown.

    Attributes:
        on: booleans of any shape, true for units that are certainly on.
        off: booleans of the same shape, true for units that are certainly off.
    """

    on: Tensor
    off: Tensor

    @classmethod
    def of(cls, on: Tensor) -> "Mask":
        """Return a mask without open units: a unit is on where ``on`` is true, else off."""
        return cls(on, ~on)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Mask":
        """Return the mask after a change of its tensors ``on`` and ``off``, such as a reshape."""
        return Mask(change(self.on), change(self.off))

    @property
    def open(self) -> Tensor:
        """Booleans, true for the units of a ReLU whose state is unknown."""
        return ~(self.on | self.off)

    def gate(self, on: Tensor | float, otherwise: Tensor) -> Tensor:
        """Return ``on`` where units are on, 0 where they are off, and ``otherwise`` where open.

        Open units are those of unknown state. ``otherwise`` has the mask's shape.

        Example:
            >>> mask = Mask(torch.tensor([True, False, False]), torch.tensor([False, True, False]))
            >>> mask.gate(1.0, torch.full((3,), 0.5))
            tensor([1.0000, 0.0000, 0.5000])
        """
        closed = torch.where(self.off, torch.zeros_like(otherwise), otherwise)
        return torch.where(self.on, torch.as_tensor(on).to(otherwise), closed)


@dataclass(frozen=True)
class Known:
    """The known outputs h of a ReLU, which the next layer takes as inputs, and its units' states.

    Attributes:
        values: h, of any shape; an entry is zero if nothing is known about it.
        bounds: the largest distance of each entry of h from that of ``values``, apart from noise: 0
            for entries that are known, ∞ for entries about which nothing is known.
        mask: which units of the ReLU are on, off, or unknown.
    """

    values: Tensor
    bounds: Tensor
    mask: Mask

    @classmethod
    def exactly(cls, values: Tensor) -> "Known":
        """Return facts by which a ReLU's outputs are ``values``; units with outputs > 0 are on."""
        return cls(values, torch.zeros_like(values), Mask.of(values > 0))

    @classmethod
    def nothing(cls, like: Tensor) -> "Known":
        """Return facts of the shape of ``like`` in which no output and no unit's state is known."""
        nowhere = torch.zeros_like(like, dtype=torch.bool)
        bounds = torch.full_like(like, torch.inf)
        return cls(torch.zeros_like(like), bounds, Mask(nowhere, nowhere))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Known":
        """Return the facts after the same change of all their tensors, such as a reshape."""
        return Known(change(self.values), change(self.bounds), self.mask.map(change))

    @property
    def told(self) -> Tensor:
        """Booleans, true for the outputs of the ReLU whose value is known."""
        return self.bounds == 0

    @property
    def valued(self) -> Tensor:
        """Booleans, true for the outputs of the ReLU whose value is known and whose unit is on."""
        return self.mask.on & self.told


def above_noise(
    values: Tensor, deviations: Tensor, least: float = NOISE_DEVIATIONS, margin: float = 0.0
) -> Tensor:
    """Return booleans, true for outputs of a ReLU that are positive beyond their noise.

    ``values`` (B, …) are estimates of the outputs for B samples. ``deviations`` > 0, which
    broadcast to the values, are the standard deviations of their noise. Let r be a value divided by
    its deviation. The result is true where r exceeds two limits. One is ``least`` ≥ 0. The other is
    ``margin`` ≥ 0 times −r at the sample's most negative r: true outputs are not negative, so that
    this r is noise alone and shows how far noise reaches among the sample's values.

    Example:
        >>> values = torch.tensor([[0.2, -0.1, 0.4]])
        >>> above_noise(values, torch.ones(1), least=0.0, margin=3.0)
        tensor([[False, False,  True]])
    """
    limits = values.new_full((len(values),), least)
    if margin:
        limits = (margin * (-values / deviations).flatten(1).amax(1)).clamp_min(least)
    return values > limits.reshape(-1, *[1] * (values.ndim - 1)) * deviations


def single(facts: T) -> T:
    """Return an object with all its double-precision tensors converted to single precision.

    The object, ``facts``, is a tensor, or a dataclass, list or dictionary with tensors among other
    things.
    """
    found: Any = facts
    if isinstance(facts, Tensor):
        found = facts.float() if facts.dtype == torch.float64 else facts
    elif isinstance(facts, list):
        found = [single(each) for each in facts]
    elif isinstance(facts, dict):
        found = {key: single(each) for key, each in facts.items()}
    elif is_dataclass(facts) and not isinstance(facts, type):
        found = replace(
            facts, **{each.name: single(getattr(facts, each.name)) for each in fields(facts)}
        )
    return cast(T, found)


def outer_product(observed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e and h such that ``e [h, 1]ᵀ`` fits a matrix (K, n + 1), by weighted least squares.

    The vectors e and h are solved in turn. The gradient ``[∂L/∂W, ∂L/∂b]`` of a linear layer for
    one sample is such a product: e is the derivative of the loss at the layer's K outputs, and h
    are its n inputs. ``weights`` (K, n + 1) ≥ 0 weigh every entry's squared error.

    Returns:
        e (K,), h (n,), and the standard deviation (n,) that noise of variance 1 / weight gives each
        entry of h if e is exact. Entries of e and h without any weight are zero; the standard
        deviation of such an entry of h is infinite.

    Raises:
        ValueError: the fitted last entry of ``[h, 1]`` is not positive, so that the scale of h
            stays unknown, for example as no entry of the last column has a weight.

    Example:
        >>> observed = torch.tensor([[2.0, -1.0], [-4.0, 2.0]])
        >>> outer_product(observed, torch.ones(2, 2))[:2]
        (tensor([-1.,  2.]), tensor([-2.]))
    """
    weighted = weights * observed
    row = torch.zeros_like(observed[0])
    row[-1] = 1.0
    error = _ratio(weighted @ row, weights @ row.square())
    for _ in range(50):
        before = row
        row = _ratio(weighted.T @ error, weights.T @ error.square())
        if not (math.isfinite(float(row.sum())) and float(row[-1]) > 0):
            raise ValueError("the last bias's gradient does not tell the scale of the features.")
        row = row / row[-1]
        error = _ratio(weighted @ row, weights @ row.square())
        if torch.allclose(row, before, rtol=1e-12, atol=0.0):
            break
    deviations = (weights.T @ error.square()).rsqrt()
    return error, row[:-1], deviations[:-1]


def _ratio(sums: Tensor, weights: Tensor) -> Tensor:
    """Return weighted means ``sums / weights`` of sums of weighted values; 0 for zero weight."""
    return torch.where(weights > 0, sums / weights.where(weights > 0, 1.0), 0.0)
