"""Shape, classes and normalisation of captured samples, read off their values."""

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec

_LEVELS = 255
_CLOSE = 1e-5
"""Values nearer to each other than this share of their range are one level, rounded."""
_OFF_GRID = 1e-3
"""Of a step: float32 is off by 1e-4, and a step of another grid of 8 bits by 1/255 somewhere."""
_MANY = 20
"""So many levels do not all fall on each second step of a finer grid by chance."""
_GLANCE = 4096
"""Values that show whether there are more levels than 8 bits have."""


PUBLIC: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "0 to 1": ((0.0,), (1.0,)),
    "0 to 255": ((0.0,), (1 / _LEVELS,)),
    "0.5 and 0.5": ((0.5,), (0.5,)),
    "MNIST": ((0.1307,), (0.3081,)),
    "Fashion-MNIST": ((0.2860,), (0.3530,)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-10, std by image": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "CIFAR-100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""The normalisations that are published with data sets, by name: mean and standard deviation of the
pixels in [0, 1], for each channel or for all channels alike."""

_WRITTEN = 0.05
"""The largest distance from an 8-bit level, in levels, of a pixel that was normalised by constants
with four decimals: 255 · 5e-5 · (1 + |x|) for |x| ≤ 2.7, the largest value under ``PUBLIC``."""


def public_statistics(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel under a public normalisation.

    Raises:
        ValueError: ``PUBLIC`` has no such name, or not for so many channels.
    """
    mean, std = PUBLIC.get(name, ((), ()))
    if len(mean) not in (1, channels):
        raise ValueError(
            f"the normalisation must be one of {list(PUBLIC)} that fits {channels} channels, got "
            f"{name!r}"
        )
    return (mean, std) if len(mean) == channels else (mean * channels, std * channels)


def public_normalization(inputs: Tensor) -> str:
    """Return the name of the public normalisation under which all values are 8-bit levels.

    The name is one of a short list. It tells of the samples which constant the app's pipeline
    uses, and no value of a pixel.

    Args:
        inputs: samples (B, C, H, W) in the model's input space.

    Returns:
        A key of ``PUBLIC``; empty where none fits, as after interpolation.
    """
    channels = inputs.shape[1]
    values = inputs.detach().cpu().double().transpose(0, 1).flatten(1)
    eps = torch.finfo(inputs.dtype).eps if inputs.dtype.is_floating_point else 0.0
    for name, (mean, _) in PUBLIC.items():
        if len(mean) not in (1, channels):
            continue
        pair = torch.tensor(public_statistics(name, channels), dtype=torch.float64)
        if all(_is_on_levels(some, pair, eps) for some in (values[:, :_GLANCE], values)):
            return name
    return ""


def _is_on_levels(values: Tensor, statistics: Tensor, eps: float) -> bool:
    """Return whether values (C, N) are k/255, k = 0 … 255, before a normalisation (2, C)."""
    mean, std = statistics
    scaled = (values * std[:, None] + mean[:, None]) * _LEVELS
    slack = _WRITTEN + _LEVELS * eps / 2 * float((values.abs() * std[:, None]).max())
    levels = scaled.round()
    inside = bool((levels >= 0).all()) and bool((levels <= _LEVELS).all())
    return inside and slack < 0.25 and bool(((scaled - levels).abs() <= slack).all())


def infer_spec(batch: Batch, num_classes: int) -> InputSpec:
    """Infer the shape and the normalisation of a client's samples, for its own scores.

    The result tells of the samples: it never travels.

    Images of 8 bits hold (k/255 − mean)/std with k = 0 … 255. So all distances of values are
    multiples of 1/(255·std) in each channel, and the smallest value is that of k = 0 where a
    black pixel occurs. Where the values lie on no such grid (interpolated, augmented), or too few
    to tell which (black and white), the box that the samples span is taken for that of pixels.

    Args:
        batch: samples (B, C, H, W) in the model's input space.
        num_classes: K.

    Returns:
        The spec of these samples.

    Raises:
        ValueError: the samples are no images.
    """
    inputs = batch.inputs.detach().cpu()
    if inputs.ndim != 4 or not inputs.is_floating_point():
        raise ValueError(
            f"expected images (B, C, H, W) of floats, got {tuple(inputs.shape)} of {inputs.dtype}"
        )
    mean, std = [], []
    single = torch.promote_types(inputs.dtype, torch.float32)  # half precision is not sorted
    for channel in inputs.to(single).transpose(0, 1).flatten(1):
        low, high = float(channel.min()), float(channel.max())
        gap = _gap(channel)
        scale = 1 / (max(high - low, 1e-6) if gap is None else _LEVELS * gap)
        std.append(_round(scale))
        mean.append(_round(-low * scale))
    shape = tuple(inputs.shape[1:])
    return InputSpec((shape[0], shape[1], shape[2]), num_classes, tuple(mean), tuple(std))


def _gap(values: Tensor) -> float | None:
    """The spacing of the grid that the values lie on; ``None`` where none or several fit."""
    if _count_levels(torch.unique(values[:_GLANCE]).double()) > _LEVELS + 1:
        return None  # of all values there are no fewer, and sorting them takes long
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
    """How many of the sorted values differ by more than rounding does."""
    return 1 + int((levels.diff() > _CLOSE * (levels[-1] - levels[0])).sum())


def _round(value: float) -> float:
    """Four decimals, which is how normalisations are written."""
    return float(f"{value:.4f}") + 0.0  # no −0
