"""Infer the shape, classes and normalisation of captured samples from their values."""

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec

_LEVELS = 255
_CLOSE = 1e-5
"""The largest difference of two values of a channel, as a share of the channel's range, at which
they count as one level. Rounding in float32 differs by less, 8-bit levels by at least 1/255."""
_OFF_GRID = 1e-3
"""The largest distance of values from the levels of a grid, as a share of its spacing. Rounding in
float32 moves values by 1e-4 of the spacing. If the true grid has one level of 8 bits more, some
value lies 1/255 of the spacing off."""
_MANY = 20
"""The least number of different values that determine the spacing of a grid. If the true spacing
were half as large, so many values would not all fall on every second level by chance."""
_GLANCE = 4096
"""The number of values that are examined first. If they already have more than 256 different
levels, the other values need not be sorted."""


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
    # Half precision becomes float32, as ``torch.unique`` takes no numbers of half precision.
    single = torch.promote_types(inputs.dtype, torch.float32)
    for channel in inputs.to(single).transpose(0, 1).flatten(1):
        low, high = float(channel.min()), float(channel.max())
        gap = _gap(channel)
        scale = 1 / (max(high - low, 1e-6) if gap is None else _LEVELS * gap)
        std.append(_round(scale))
        mean.append(_round(-low * scale))
    shape = tuple(inputs.shape[1:])
    return InputSpec((shape[0], shape[1], shape[2]), num_classes, tuple(mean), tuple(std))


def _gap(values: Tensor) -> float | None:
    """Return the spacing, in units of the values, of the grid on which a channel's values (N,) lie.

    ``None`` is returned if no grid fits, or if several do.
    """
    if _count_levels(torch.unique(values[:_GLANCE]).double()) > _LEVELS + 1:
        # The first ``_GLANCE`` values have too many levels for a grid, and so do all together.
        return None
    levels = torch.unique(values).double()
    count = _count_levels(levels)
    if not 1 < count <= _LEVELS + 1:
        return None
    width = float(levels[-1] - levels[0])
    apart = levels.diff()
    # The spacing is at most the least distance of two levels. So the range of the values has at
    # least this number of steps.
    fewest = round(width / float(apart[apart > _CLOSE * width].min()))
    for steps in range(fewest, _LEVELS + 1):
        places = (levels - levels[0]) * (steps / width)
        if bool(((places - places.round()).abs() < _OFF_GRID).all()):
            finer_fits = 2 * steps <= _LEVELS and count < _MANY
            return None if finer_fits else width / steps
    return None


def _count_levels(levels: Tensor) -> int:
    """Return the number of different values in a sorted tensor. Values that differ by at most
    ``_CLOSE`` of the range count as one.
    """
    return 1 + int((levels.diff() > _CLOSE * (levels[-1] - levels[0])).sum())


def _round(value: float) -> float:
    """Return a value rounded to four decimals, with which normalisations are usually written."""
    return float(f"{value:.4f}") + 0.0  # adding 0 turns −0 into 0
