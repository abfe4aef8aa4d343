"""Activations and pooling between the layers of a chain, each linearised at a point.

A stage takes values (n, B), those of a sample below one another, and gives others. At a point it is
a :class:`Bend`: changes dz of its inputs become ``φ' dz``, and changes dδ of its outputs' errors δ
become, with what its own bending adds,

    φ'ᵀ dδ + (φ'' δ) dz.

The maximum of a window depends on all of the window's inputs, so that φ' is a row and ``φ'' δ`` a
matrix of each window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.network.activations import Activation
from flwr_leakage.attacks.network.blur import blurred_largest, blurred_parts
from flwr_leakage.attacks.network.calls import Pool, largest, mean


@dataclass(frozen=True)
class Places:
    """Which of n values are taken, each as often as it is named.

    Attributes:
        gathered: the number of the value at each place (m,); n for none.
        scattered: for each value, the places that hold it (r, n); m for none.
    """

    gathered: Tensor
    scattered: Tensor

    @classmethod
    def of(cls, gathered: Tensor, count: int) -> "Places":
        """Of numbers below ``count``, which stands for none."""
        inside = (gathered < count).nonzero()[:, 0]
        order = inside[gathered[inside].argsort(stable=True)]
        uses = gathered[order].bincount(minlength=count)
        number = torch.arange(len(order)) - (uses.cumsum(0) - uses)[gathered[order]]
        scattered = torch.full((int(uses.max()), count), len(gathered))
        scattered[number, gathered[order]] = order
        return cls(gathered, scattered)

    def taken(self, values: Tensor) -> Tensor:
        """Of values (n, B), those at all places (m, B); zero where there is none."""
        return _take(values, self.gathered)

    def summed(self, taken: Tensor) -> Tensor:
        """Σ over the places of each value (n, B): the transpose of :meth:`taken`."""
        found = _take(taken, self.scattered.flatten())
        if len(self.scattered) == 1:
            return found.reshape(-1, taken.shape[1])
        return found.reshape(len(self.scattered), -1).sum(0).reshape(-1, taken.shape[1])


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of values (n, B) at given places (m, B), of which n is a row of zeros."""
    samples = values.shape[1]
    if samples == 1:  # rows of one number are dear
        values = values[:, 0]
    taken = torch.cat([values, torch.zeros_like(values[:1])]).index_select(0, places)
    return taken.reshape(-1, samples)


@runtime_checkable
class Bend(Protocol):
    """A stage at a point."""

    def up(self, changes: Tensor) -> Tensor:
        """φ' dz of changes of its inputs (n, B)."""

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        """``φ'ᵀ dδ + (φ'' δ) dz`` of changes of its outputs' errors and of its inputs."""

    def reached_by(self, errors: Tensor) -> "tuple[Bend, Tensor]":
        """The same with ``φ'' δ`` for errors δ of its outputs, and ``φ'ᵀ δ``."""


@runtime_checkable
class Stage(Protocol):
    """An activation or a pooling."""

    @property
    def shape(self) -> torch.Size:
        """Of a sample's inputs."""

    @property
    def has_kinks(self) -> bool:
        """Whether it can be blurred, so that a width belongs to it."""

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, Bend]:
        """Its outputs at values (n, B), and how it bends there.

        Args:
            values: its inputs.
            width: σ of its blur, of the values' shape; ``None`` for none.
        """


@dataclass(frozen=True)
class _Elementwise:
    """φ' of each value (n, B), and φ'', which is multiplied by the errors that reach it."""

    slope: Tensor
    curvature: Tensor

    def up(self, changes: Tensor) -> Tensor:
        return self.slope * changes

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        return torch.addcmul(self.curvature * changes, self.slope, errors)

    def reached_by(self, errors: Tensor) -> tuple[Bend, Tensor]:
        return replace(self, curvature=self.curvature * errors), self.slope * errors


@dataclass(frozen=True)
class Elements:
    """An activation.

    Attributes:
        shape: of a sample's inputs.
        activation: which.
    """

    shape: torch.Size
    activation: Activation

    @property
    def has_kinks(self) -> bool:
        """See :class:`Stage`."""
        return bool(self.activation.kinks)

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, Bend]:
        """See :class:`Stage`."""
        outputs, slope, curvature = blurred_parts(self.activation, values, width)
        return outputs, _Elementwise(slope, curvature)


@dataclass(frozen=True)
class _Windows:
    """φ' of each window (k, m, B), and φ'' (k, k, m, B), multiplied by the errors of its output.

    Attributes:
        places: the windows' inputs, k · m of them.
        slope: φ'.
        curvature: φ'', ``None`` for zero.
    """

    places: Places
    slope: Tensor
    curvature: Tensor | None

    def up(self, changes: Tensor) -> Tensor:
        return (self.slope * self._windows(changes)).sum(0)

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        found = self.slope * errors
        if self.curvature is not None:
            found = found + (self.curvature * self._windows(changes)).sum(1)
        return self.places.summed(found.flatten(0, 1))

    def reached_by(self, errors: Tensor) -> tuple[Bend, Tensor]:
        curvature = None if self.curvature is None else self.curvature * errors
        own = self.places.summed((self.slope * errors).flatten(0, 1))
        return replace(self, curvature=curvature), own

    def _windows(self, values: Tensor) -> Tensor:
        return self.places.taken(values).reshape(self.slope.shape)


@dataclass(frozen=True)
class Pooling:
    """One value of each window.

    Attributes:
        shape: of a sample's inputs.
        places: the windows' inputs, (k · m): first those at the first position of each window.
        size: k, values in a window.
        reduce: of values (k, …), what a window gives (…).
    """

    shape: torch.Size
    places: Places
    size: int
    reduce: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, shape: torch.Size, pool: Pool) -> "Pooling":
        """Of inputs of a shape (C, H, W).

        Raises:
            ValueError: a window reaches beyond the inputs.
        """
        numbers = torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).reshape(1, *shape)
        maps = pool.maps(numbers, 0.0)
        gathered = torch.stack(maps).flatten().long() - 1
        if bool((gathered < 0).any()):
            raise ValueError("windows must lie within the inputs.")
        return cls(shape, Places.of(gathered, shape.numel()), len(maps), pool.reduce)

    @property
    def has_kinks(self) -> bool:
        """See :class:`Stage`."""
        return self.reduce is largest

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, Bend]:
        """See :class:`Stage`."""
        windows = self._windows(values)
        if self.reduce is mean:
            slope = torch.full_like(windows, 1 / self.size)
            return windows.mean(0), _Windows(self.places, slope, None)
        if self.has_kinks and width is None:
            place = windows.argmax(0, keepdim=True)
            slope = torch.zeros_like(windows).scatter_(0, place, 1.0)
            return windows.gather(0, place)[0], _Windows(self.places, slope, None)
        with torch.enable_grad():
            windows = windows.detach().requires_grad_()
            if self.has_kinks and width is not None:
                outputs = blurred_largest(list(windows), list(self._windows(width)))
            else:
                outputs = self.reduce(windows)
            (slope,) = torch.autograd.grad(outputs.sum(), windows, create_graph=True)
            rows = [torch.autograd.grad(row.sum(), windows, retain_graph=True)[0] for row in slope]
        return outputs.detach(), _Windows(self.places, slope.detach(), torch.stack(rows))

    def _windows(self, values: Tensor) -> Tensor:
        return self.places.taken(values).reshape(self.size, -1, values.shape[1])


def below(values: Tensor) -> Tensor:
    """(B, …) as (n, B)."""
    return values.flatten(1).T.contiguous()
