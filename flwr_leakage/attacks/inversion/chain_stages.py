"""Activations and pooling between the layers of a chain, each linearised at a point.

A stage maps values (n, B), with one sample in each column, to other values. Its ``at`` returns the
outputs at some values, blurred by widths (n, B) if they are given, and a :data:`Bend`, its
linearisation there. ``up`` maps changes dz of the inputs to ``φ' dz``. ``reached_by`` multiplies
φ'' by the outputs' errors δ, and returns ``φ'ᵀ δ``, too. ``down`` maps changes dδ of these errors
to

    φ'ᵀ dδ + (φ'' δ) dz.

The maximum of a window depends on all of the window's inputs, so that φ' is a row and ``φ'' δ`` a
matrix of each window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.network.activations import Activation
from flwr_leakage.attacks.network.blur import blurred_largest, blurred_parts
from flwr_leakage.attacks.network.calls import Pool, largest, mean


@dataclass(frozen=True)
class Places:
    """The indices by which m places are filled with n values, each used any number of times.

    Attributes:
        gathered: (m,) index of the value at each place; n for none.
        scattered: (r, n) indices of the places that hold each value; m for none.
    """

    gathered: Tensor
    scattered: Tensor

    @classmethod
    def of(cls, gathered: Tensor, count: int) -> "Places":
        """Return the places with given indices below ``count``, which stands for none."""
        inside = (gathered < count).nonzero()[:, 0]
        order = inside[gathered[inside].argsort(stable=True)]
        uses = gathered[order].bincount(minlength=count)
        number = torch.arange(len(order)) - (uses.cumsum(0) - uses)[gathered[order]]
        scattered = torch.full((int(uses.max()), count), len(gathered))
        scattered[number, gathered[order]] = order
        return cls(gathered, scattered)

    def taken(self, values: Tensor) -> Tensor:
        """Return the values at all places (m, B), for values (n, B); zero at empty places."""
        return _take(values, self.gathered)

    def summed(self, taken: Tensor) -> Tensor:
        """Return the sum over the places of each value (n, B), the transpose of :meth:`taken`."""
        found = _take(taken, self.scattered.flatten())
        if len(self.scattered) == 1:
            return found.reshape(-1, taken.shape[1])
        return found.reshape(len(self.scattered), -1).sum(0).reshape(-1, taken.shape[1])


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of values (n, B) with given indices, as (m, B); row n is zero."""
    samples = values.shape[1]
    if samples == 1:  # selecting rows of one number is slow
        values = values[:, 0]
    taken = torch.cat([values, torch.zeros_like(values[:1])]).index_select(0, places)
    return taken.reshape(-1, samples)


@dataclass(frozen=True)
class _Elementwise:
    """The slope φ' (n, B) of each value, and φ'' (n, B), times the errors once these are known."""

    slope: Tensor
    curvature: Tensor

    def up(self, changes: Tensor) -> Tensor:
        return self.slope * changes

    def down(self, errors: Tensor, changes: Tensor) -> Tensor:
        return torch.addcmul(self.curvature * changes, self.slope, errors)

    def reached_by(self, errors: Tensor) -> "tuple[Bend, Tensor]":
        return replace(self, curvature=self.curvature * errors), self.slope * errors


@dataclass(frozen=True)
class Elements:
    """An activation.

    Attributes:
        shape: shape of a sample's inputs.
        activation: the activation.
    """

    shape: torch.Size
    activation: Activation

    @property
    def has_kinks(self) -> bool:
        """Return whether the stage has kinks, so that it can be blurred by a width."""
        return bool(self.activation.kinks)

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, "Bend"]:
        """Return the outputs at values (n, B), and the linearisation there."""
        outputs, slope, curvature = blurred_parts(self.activation, values, width)
        return outputs, _Elementwise(slope, curvature)


@dataclass(frozen=True)
class _Windows:
    """A pooling linearised at B samples, with m windows of k inputs in each of them.

    φ maps the k inputs of one window to its output.

    Attributes:
        places: the k · m places of the windows' inputs.
        slope: (k, m, B) the first derivatives φ' by a window's inputs.
        curvature: (k, k, m, B) the second derivatives φ'', times the outputs' errors once these are
            known; ``None`` for zero.
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

    def reached_by(self, errors: Tensor) -> "tuple[Bend, Tensor]":
        curvature = None if self.curvature is None else self.curvature * errors
        own = self.places.summed((self.slope * errors).flatten(0, 1))
        return replace(self, curvature=curvature), own

    def _windows(self, values: Tensor) -> Tensor:
        return self.places.taken(values).reshape(self.slope.shape)


@dataclass(frozen=True)
class Pooling:
    """A pooling, which gives one value for each window.

    Attributes:
        shape: shape of a sample's inputs.
        places: the k · m places of the windows' inputs, first those at each window's first
            position.
        size: number k of values in a window.
        reduce: map from the values of windows (k, …) to their outputs (…).
    """

    shape: torch.Size
    places: Places
    size: int
    reduce: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, shape: torch.Size, pool: Pool) -> "Pooling":
        """Return the pooling of inputs of a shape (C, H, W).

        Raises:
            ValueError: a window extends beyond the inputs.
        """
        numbers = torch.arange(1.0, shape.numel() + 1, dtype=torch.float64).reshape(1, *shape)
        maps = pool.maps(numbers, 0.0)
        gathered = torch.stack(maps).flatten().long() - 1
        if bool((gathered < 0).any()):
            raise ValueError("windows must lie within the inputs.")
        return cls(shape, Places.of(gathered, shape.numel()), len(maps), pool.reduce)

    @property
    def has_kinks(self) -> bool:
        """Return whether the stage has kinks, so that it can be blurred by a width."""
        return self.reduce is largest

    def at(self, values: Tensor, width: Tensor | None) -> tuple[Tensor, "Bend"]:
        """Return the outputs at values (n, B), and the linearisation there."""
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
    """Return values (B, …) as (n, B)."""
    return values.flatten(1).T.contiguous()


Bend = _Elementwise | _Windows
"""The linearisation of a stage at a point."""

Nonlinear = Elements | Pooling
"""An activation or a pooling."""
