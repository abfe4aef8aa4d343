"""Find the entries of an update that a client clipped to one largest magnitude."""

from collections.abc import Mapping

import torch
from torch import Tensor

_CLOSE = 1e-4
"""Relative difference up to which two magnitudes count as the same. A client sends parameters that
are rounded to 2⁻²⁴ of their size. If training changes a parameter by a thousandth of its size, this
rounding is 6e-5 of the change."""

_PLACES = 3
"""Number of outputs of layers that must have an entry of the largest magnitude before entries count
as clipped. One output is not enough, as its entries are an error times the inputs, of which several
may be alike. Nor are two, as the two outputs of a binary classifier have opposite errors."""


def clipped_entries(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a mask for each tensor of a gradient that is true where an entry was clipped.

    The masks are boolean, and have the names and shapes of the tensors. A filter, such as NVIDIA
    FLARE's, may limit the magnitude of every entry of an update. Then many entries have the largest
    magnitude of the whole update. Nothing counts as clipped if such entries lie in the rows of
    fewer than three output units, or if all nonzero entries of a matrix have this magnitude, as
    they are then signs.
    """
    tops = {name: _largest(value) for name, value in gradient.items()}
    limit = max(tops.values(), default=0.0) * (1 - _CLOSE)
    found = {
        name: (value.abs() >= limit) & (value != 0)
        for name, value in gradient.items()
        if tops[name] >= limit
    }
    places = {
        (name.rpartition(".")[0], int(row))
        for name, at in found.items()
        for row in (at.reshape(len(at), -1).any(1).nonzero() if at.ndim else [])
    }
    signs = any(
        int(at.sum()) > _PLACES and int(at.sum()) == int((gradient[name] != 0).sum())
        and gradient[name].ndim > 1
        for name, at in found.items()
    )  # fmt: skip
    is_clipped = len(places) >= _PLACES and not signs
    return {
        name: found[name]
        if is_clipped and name in found
        else torch.zeros_like(value, dtype=torch.bool)
        for name, value in gradient.items()
    }


def _largest(value: Tensor) -> float:
    """Return the largest magnitude of a tensor, 0 if it is empty."""
    return max(map(abs, map(float, value.aminmax()))) if value.numel() else 0.0


def without_clipped(gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the gradient with zeros in place of clipped entries, as if they had been pruned."""
    found = clipped_entries(gradient)
    if not any(bool(at.any()) for at in found.values()):
        return gradient
    return {name: value.masked_fill(found[name], 0) for name, value in gradient.items()}
