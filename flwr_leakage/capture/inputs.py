"""Infer the shape, classes and normalisation of captured samples from their values."""

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec

_LEVELS = 255
_CLOSE = 1e-5
"""The share of their range up to which values differ by rounding only, and count as one level."""
_OFF_GRID = 1e-3
"""The share of a grid's step by which values may miss the grid: rounding in float32 moves them by
1e-4 of a step, and the values of a grid with one 8-bit step more miss it by 1/255 somewhere."""
_MANY = 20
"""The number of different levels that determine a grid. If the true grid were finer, so many would
not all fall on every second step of it by chance."""
_GLANCE = 4096
"""The number of values that are tried first, to see whether there are more levels than 8 bits
have."""


def infer_spec(batch: Batch, num_classes: int) -> InputSpec:
    """Return the spec of a client's samples, inferred from their values, for its own scores.

    The result reveals facts about the samples, so it must not be sent to the server. ``batch`` has
    inputs (B, C, H, W) as the model takes them.

    Images of 8 bits hold (k/255 − mean)/std with k = 0 … 255. So all differences of values are
    multiples of 1/(255·std) in each channel, and the smallest value is that of k = 0 if a black
    pixel occurs. Values of interpolated or augmented images lie on no such grid, and those of
    images in black and white are too few to determine it. Then the smallest and the largest value
    of a channel are taken for pixels of 0 and 1.

    Raises:
        ValueError: the samples are no images.
    """
    inputs = batch.inputs.detach().cpu()
    if inputs.ndim != 4 or not inputs.is_floating_point():
        raise ValueError(
            f"expected images (B, C, H, W) of floats, got {tuple(inputs.shape)} of {inputs.dtype}"
        )
    mean, std = [], []
    single = torch.promote_types(inputs.dtype, torch.float32)  # sorting takes no half precision
    for channel in inputs.to(single).transpose(0, 1).flatten(1):
        low, high = float(channel.min()), float(channel.max())
        gap = _gap(channel)
        scale = 1 / (max(high - low, 1e-6) if gap is None else _LEVELS * gap)
        std.append(_round(scale))
        mean.append(_round(-low * scale))
    shape = tuple(inputs.shape[1:])
    return InputSpec((shape[0], shape[1], shape[2]), num_classes, tuple(mean), tuple(std))


def _gap(values: Tensor) -> float | None:
    """Return the spacing of the grid on which the values of a channel lie.

    ``None`` is returned if no grid or several fit.
    """
    if _count_levels(torch.unique(values[:_GLANCE]).double()) > _LEVELS + 1:
        return None  # all values have no fewer levels, and need not be sorted, which takes long
    levels = torch.unique(values).double()
    count = _count_levels(levels)
    if not 1 < count <= _LEVELS + 1:
        return None
    width = float(levels[-1] - levels[0])
    apart = levels.diff()
    fewest = round(width / float(apart[apart > _CLOSE * width].min()))  # no gap is below one step
    for steps in range(fewest, _LEVELS + 1):
        places = (levels - levels[0]) * (steps / width)
        if bool(((places - places.round()).abs() < _OFF_GRID).all()):
            finer_fits = 2 * steps <= _LEVELS and count < _MANY
            return None if finer_fits else width / steps
    return None


def _count_levels(levels: Tensor) -> int:
    """Return the number of different values among sorted ones; differences by rounding are none."""
    return 1 + int((levels.diff() > _CLOSE * (levels[-1] - levels[0])).sum())


def _round(value: float) -> float:
    """Return a value rounded to four decimals, with which normalisations are usually written."""
    return float(f"{value:.4f}") + 0.0  # no −0
