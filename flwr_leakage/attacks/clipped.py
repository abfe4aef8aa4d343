"""Entries that a filter clipped to one magnitude, as an update shows them."""

from collections.abc import Mapping

import torch
from torch import Tensor

_CLOSE = 1e-4
"""Magnitudes that differ by less, relatively, are the same. What travels are parameters, rounded to
2⁻²⁴: 6e-5 of a change that is a thousandth of its parameter."""

_PLACES = 3
"""Outputs of layers that must have an entry of the largest magnitude. The entries of one output are
an error times the inputs, of which several may be alike; two outputs of a binary classifier have
opposite errors."""


def clipped_entries(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return which entries of a gradient, by name, were clipped, as NVIDIA FLARE's filters do.

    Clipping leaves many entries of the largest magnitude of all, in several outputs and several
    layers. A tensor whose entries other than zero all have one magnitude shows signs, not a clip.
    """
    largest = max((float(v.abs().max()) for v in gradient.values() if v.numel()), default=0.0)
    found = {n: (v.abs() >= largest * (1 - _CLOSE)) & (v != 0) for n, v in gradient.items()}
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
    if len(places) < _PLACES or signs:
        return {name: torch.zeros_like(at) for name, at in found.items()}
    return found


def without_clipped(gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the gradient with zeros for what was clipped, as if it were pruned at random."""
    found = clipped_entries(gradient)
    if not any(bool(at.any()) for at in found.values()):
        return gradient
    return {name: value.masked_fill(found[name], 0) for name, value in gradient.items()}
