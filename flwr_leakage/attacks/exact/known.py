"""Hold the known values of a layer's inputs, and the known states of the ReLU behind them.

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
"""Outputs of a ReLU below this multiple of the range of their noise count as zero."""


@dataclass(frozen=True)
class Mask:
    """The states of a ReLU's units, of which each is on, off, or open, which means unknown.

    Attributes:
        on: booleans, true for units that are certainly on.
        off: booleans of the same shape, true for units that are certainly off.
    """

    on: Tensor
    off: Tensor

    @classmethod
    def of(cls, on: Tensor) -> "Mask":
        """Return a mask without open units, of booleans that are true for units that are on."""
        return cls(on, ~on)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Mask":
        """Return the mask after ``change`` of its tensors, which may reshape or select entries."""
        return Mask(change(self.on), change(self.off))

    @property
    def open(self) -> Tensor:
        """Booleans, true for units of unknown state."""
        return ~(self.on | self.off)

    def gate(self, on: Tensor | float, otherwise: Tensor) -> Tensor:
        """Return ``on`` where units are on, 0 where they are off, and ``otherwise`` where open.

        Example:
            >>> mask = Mask(torch.tensor([True, False, False]), torch.tensor([False, True, False]))
            >>> mask.gate(1.0, torch.full((3,), 0.5))
            tensor([1.0000, 0.0000, 0.5000])
        """
        closed = torch.where(self.off, torch.zeros_like(otherwise), otherwise)
        return torch.where(self.on, torch.as_tensor(on).to(otherwise), closed)


@dataclass(frozen=True)
class Known:
    """The known values of a layer's inputs h, and the states of the ReLU that puts them out.

    Attributes:
        values: h, zero if nothing is known about an entry.
        bounds: largest distance of an entry from its value, without noise: 0 for entries that are
            known, ∞ for entries about which nothing is known.
        mask: the mask of the ReLU whose outputs these entries are.
    """

    values: Tensor
    bounds: Tensor
    mask: Mask

    @classmethod
    def exactly(cls, values: Tensor) -> "Known":
        """Return entries whose values are all known; a unit is on if its value is positive."""
        return cls(values, torch.zeros_like(values), Mask.of(values > 0))

    @classmethod
    def nothing(cls, like: Tensor) -> "Known":
        """Return facts of the shape of ``like`` that say nothing."""
        nowhere = torch.zeros_like(like, dtype=torch.bool)
        bounds = torch.full_like(like, torch.inf)
        return cls(torch.zeros_like(like), bounds, Mask(nowhere, nowhere))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Known":
        """Return the facts after ``change`` of the tensors, which may reshape or select entries."""
        return Known(change(self.values), change(self.bounds), self.mask.map(change))

    @property
    def told(self) -> Tensor:
        """Booleans, true for entries whose value is known."""
        return self.bounds == 0

    @property
    def valued(self) -> Tensor:
        """Booleans, true for units that are on and whose value is known."""
        return self.mask.on & self.told


def above_noise(
    values: Tensor, deviations: Tensor, least: float = NOISE_DEVIATIONS, margin: float = 0.0
) -> Tensor:
    """Return booleans, true for outputs of a ReLU that are positive beyond their noise.

    Outputs of a ReLU are not negative, so that a negative value is noise alone. The most negative
    value of a sample, in units of its deviation, shows how far noise reaches among its values.

    Args:
        values: h (B, …) of B samples.
        deviations: standard deviation of each value's noise, broadcast to the values, > 0.
        least: number of its deviations that a value must exceed, ≥ 0.
        margin: multiple of its sample's most negative value that a value must also exceed, ≥ 0.

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
    """Return facts with all double-precision tensors converted to single precision.

    Args:
        facts: a tensor, or a dataclass, list or dictionary of facts and of anything else.
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
    """Return e and h such that ``e [h, 1]ᵀ`` fits a matrix best, by weighted least squares.

    e and h are solved in turn. The gradient ``[∂L/∂W, ∂L/∂b]`` of a linear layer for one sample is
    such a product, with the error e of its outputs and its inputs h.

    Args:
        observed: (K, n + 1) the matrix.
        weights: (K, n + 1) weight of every entry's square, ≥ 0.

    Returns:
        e (K,), h (n,), and the standard deviation (n,) of each entry of h if e were exact. Entries
        of e and h without any weight are zero; the deviation of such an entry of h is infinite.

    Raises:
        ValueError: no entry of the last column has a weight, or they contradict the others.

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
    """Return weighted means, sums over weights; 0 for means without any weight."""
    return torch.where(weights > 0, sums / weights.where(weights > 0, 1.0), 0.0)
