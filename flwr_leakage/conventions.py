"""List published normalisations of images, and recognise one by the values of inputs.

A pixel of 8 bits is k/255 with k = 0 … 255. So the inputs of a network lie on the grid
``(k/255 − mean) / std``, one for each channel. The grid of a wrong normalisation meets many values
of another grid by chance only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.records import InputSpec

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""The mean and the standard deviation of pixels in [0, 1], for each channel."""

PUBLIC: dict[str, Statistics] = {
    "0 to 1": ((0.0,), (1.0,)),
    "0 to 16": ((0.0,), (1 / 16,)),
    "0 to 255": ((0.0,), (1 / 255,)),
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

DEPTHS = (255, 16)
"""The largest level of a pixel: of images of 8 bits, and of the digits of scikit-learn."""

WRITTEN = 2e-4
"""The largest distance of a pixel from its level under constants that are written with four
decimals: 5e-5 · (1 + |x|) for |x| ≤ 2.7, the largest value under ``PUBLIC``."""

LARGEST_DEVIATION = 0.15
"""In levels. Values that lie anywhere have a root mean square distance of 0.29 from a level."""

OUTSIDE_DEVIATIONS = 10
"""So many standard deviations of their own error lie values outside of a box that is wrong."""

FEW, MANY = 5, 20
"""Levels of a channel. Fewer than ``FEW`` lie on many grids. ``MANY`` do not all fall on each
second level by chance: the grid is too fine then, and the true one is coarser."""


def public_statistics(name: str, channels: int) -> Statistics:
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


def public_specs(spec: InputSpec) -> dict[str, InputSpec]:
    """Return inputs of the same shape under each public normalisation that fits, by its name."""
    channels = spec.shape[0]
    found = {}
    for name, (mean, _) in PUBLIC.items():
        if len(mean) in (1, channels):
            mean, std = public_statistics(name, channels)
            found[name] = replace(spec, mean=mean, std=std, box=True)
    return found


def possible_specs(spec: InputSpec) -> list[InputSpec]:
    """Return the specs that inputs may have: the given one, and if it is unknown all public ones.

    All of them are known ones. The given one is the first.
    """
    given = replace(spec, known=True)
    if spec.known or not spec.box:
        return [given]
    others = public_specs(given).values()
    return [given, *(one for one in others if not normalizations_agree(one, given))]


def public_normalization(inputs: Tensor) -> str:
    """Return the name of the public normalisation under which all values are levels of pixels.

    The name is one of a short list. It tells of the samples which constant the app's pipeline
    uses, and no value of a pixel.

    Args:
        inputs: samples (B, C, H, W) in the model's input space.

    Returns:
        A key of ``PUBLIC``; empty where none fits, as after interpolation.
    """
    eps = torch.finfo(inputs.dtype).eps if inputs.dtype.is_floating_point else 0.0
    error = eps / math.sqrt(12) * float(inputs.detach().abs().max())
    shape = inputs.shape[1], inputs.shape[2], inputs.shape[3]
    values = inputs.detach().cpu().double()
    specs = public_specs(InputSpec(shape, 1))
    grids = {name: _grid(values, spec, error) for name, spec in specs.items()}
    fit = [name for name, grid in grids.items() if grid is not None]
    return next((name for name in fit if _possible(grids[name])), next(iter(fit), ""))


def normalizations_agree(one: InputSpec, other: InputSpec) -> bool:
    """Return whether normalisations agree to half a level of 8 bits."""
    pairs = zip((*one.mean, *one.std), (*other.mean, *other.std), strict=False)
    return len(one.mean) == len(other.mean) and all(abs(a - b) <= 0.5 / 255 for a, b in pairs)


Claim = Literal["confirmed", "read off", "as told", "refuted", "by fit"]
"""Basis of a claim about pixels; see :class:`Reading`. ``by fit`` is said of a normalisation
that is unknown, and that inputs do not show."""

CONFIRMED = "The values are levels of pixels under the normalisation that was told, and no other."

AS_TOLD = (
    "The pixels are right if the normalisation that the attack was told is: the values lie on no "
    "grid of levels, as after interpolation, that would show it."
)
"""The reason, for the user, why proven inputs in the box of valid pixels do not confirm it."""

REFUTED = (
    "The network's inputs are proven, but no pixels are: {why}. So the normalisation that the "
    "attack was told is wrong, or the inputs are no images of 8 bits; for others, such as tables "
    "and embeddings, give a spec with box=False."
)
"""The reason, for the user, why proven inputs prove no pixels."""

SEVERAL = (
    "The network's inputs are proven, but no pixels are: the inputs are levels of pixels under the "
    "normalisation that the attack was told, and under {others} too."
)
"""The same, where too few levels occur to tell normalisations apart."""

OUTSIDE = "they lie outside of the box of valid pixels by more than their own error"
OFF_LEVELS = "they lie on a grid of levels, but not on that of the normalisation"
NO_IMAGES = "inputs in a single row or column that are no levels of pixels may be a table"


@dataclass(frozen=True)
class Reading:
    """The normalisation that exact inputs of a network show.

    Attributes:
        claim: ``confirmed`` if the inputs themselves show the normalisation that was told, ``read
            off`` if they show another one and no third, ``as told`` if they speak neither for nor
            against it, and ``refuted`` if they speak against it or for several.
        reason: the same in words, for the user.
        spec: the normalisation under which the inputs are pixels; ``None`` if it is refuted.
    """

    claim: Claim
    reason: str
    spec: InputSpec | None


def read_normalization(inputs: Tensor, told: InputSpec, error: float) -> Reading:
    """Return the normalisation that exact inputs of a network show.

    The normalisation that was told is confirmed if all values are levels of pixels under it, and
    under no other public normalisation. If they are none, the one public normalisation that fits is
    read off. Values outside of the box of valid pixels refute what was told; if both black and
    white occur in each channel, the right normalisation follows from them. Values on no grid at
    all neither confirm nor refute what was told, unless they are a single row or column.

    Args:
        inputs: (B, C, H, W) values that are exact but for their error.
        told: the normalisation that the attack was told.
        error: standard deviation of the values' errors.
    """
    values = inputs.detach().cpu().double()
    specs = {n: s for n, s in public_specs(told).items() if not normalizations_agree(s, told)}
    grids = {name: _grid(values, spec, error) for name, spec in specs.items()}
    others = [name for name, grid in grids.items() if _possible(grid)]
    own = _grid(values, told, error)
    if _possible(own) and not others:
        if _confirmed(own):
            return Reading("confirmed", CONFIRMED, told)
        return Reading("as told", AS_TOLD, told)  # too few levels
    if not _possible(own) and len(others) == 1 and _confirmed(grids[others[0]]):
        return Reading("read off", _wrong(f"{others[0]!r}"), specs[others[0]])
    if float((values - told.clamp(values)).abs().max()) > OUTSIDE_DEVIATIONS * error:
        found = None if others else _between_black_and_white(values, told, error)
        if found is None:
            return Reading("refuted", REFUTED.format(why=OUTSIDE), None)
        right = f"the mean {found.mean} and the deviation {found.std}"
        return Reading("read off", _wrong(right), found)
    if others:
        names = " and ".join(map(repr, others))
        if _possible(own):
            return Reading("refuted", SEVERAL.format(others=names), None)
        why = f"they are levels of pixels under {names}, and not as was told"
        return Reading("refuted", REFUTED.format(why=why), None)
    if any(_is_on_a_grid(channel.flatten(), error) for channel in values.transpose(0, 1)):
        return Reading("refuted", REFUTED.format(why=OFF_LEVELS), None)
    if min(told.shape[1:]) == 1:
        return Reading("refuted", REFUTED.format(why=NO_IMAGES), None)
    return Reading("as told", AS_TOLD, told)


def _wrong(right: str) -> str:
    return (
        f"The normalisation that the attack was told is wrong: the values are levels of pixels "
        f"under {right} alone, which is used."
    )


def _grid(values: Tensor, spec: InputSpec, error: float) -> list[tuple[int, int]] | None:
    """Return how many levels occur in each channel, and the divisor of all their distances.

    Returns:
        For each channel the number of levels and the divisor, or ``None`` if a value is no level.
    """
    for depth in DEPTHS:
        found = []
        for channel, mean, std in zip(values.transpose(0, 1), spec.mean, spec.std, strict=True):
            one = _levels(channel.flatten(), mean, std, error, depth)
            if one is None:
                break
            found.append((len(one), math.gcd(*(level - one[0] for level in one)) or depth))
        else:
            return found
    return None


def _levels(
    values: Tensor, mean: float, std: float, error: float, depth: int
) -> Sequence[int] | None:
    """Return the levels that occur; ``None`` if a value is no level, or if errors are too large."""
    slack = depth * (WRITTEN + std * error)
    if slack > LARGEST_DEVIATION:
        return None
    scaled = (values * std + mean) * depth
    if float(scaled.min()) < -0.5 or float(scaled.max()) > depth + 0.5:
        return None
    levels = scaled.round().clamp(0, depth).long()
    counts = torch.bincount(levels)
    squares = torch.bincount(levels, weights=(scaled - levels).square())[counts > 0]
    # Each level counts once, as most pixels of some images are black.
    if float((squares / counts[counts > 0]).mean().sqrt()) > slack:
        return None
    return [int(level) for level in counts.nonzero().flatten()]


def _possible(grid: list[tuple[int, int]] | None) -> bool:
    """Return whether all values are levels, and do not show that the true grid is coarser."""
    return grid is not None and all(step == 1 or count < MANY for count, step in grid)


def _confirmed(grid: list[tuple[int, int]] | None) -> bool:
    """Return whether all values are levels, of which enough occur to show each single step."""
    return grid is not None and all(step == 1 and count >= FEW for count, step in grid)


def _is_on_a_grid(values: Tensor, error: float) -> bool:
    """Return whether values (N,) lie on a grid of at most 256 levels, by more than chance.

    Images that are interpolated, or averages of several pixels, lie on none.
    """
    ordered = values.sort().values
    width = float(ordered[-1] - ordered[0])
    near = 5 * error
    apart = torch.cat([ordered.diff() > 2 * near, torch.tensor([True])])
    levels = ordered[apart] - ordered[0]
    if not MANY <= len(levels) <= DEPTHS[0] + 1:
        return False
    least = max(float(levels.diff().min()), 2 * near)
    fewest = max(len(levels) - 1, round(width / (least + near)))
    for steps in range(fewest, DEPTHS[0] + 1):
        places = levels * (steps / width)
        slack = LARGEST_DEVIATION / 3 + near * steps / width
        if slack < 2 * LARGEST_DEVIATION and bool(((places - places.round()).abs() < slack).all()):
            return True
    return False


def _between_black_and_white(values: Tensor, told: InputSpec, error: float) -> InputSpec | None:
    """Return the normalisation under which the extremes of each channel are black and white.

    It is the only one if many values are levels under it, and neighbours occur. If black or white
    do not occur, no such grid fits.
    """
    channels = values.transpose(0, 1).flatten(1)
    low, high = channels.amin(1), channels.amax(1)
    if not bool((high > low).all()):
        return None
    std = [_rounded(1 / width) for width in (high - low).tolist()]
    mean = [_rounded(-darkest * each) for darkest, each in zip(low.tolist(), std, strict=True)]
    found = replace(told, mean=tuple(mean), std=tuple(std), box=True)
    grid = _grid(values, found, error)
    is_only = _confirmed(grid) and all(count >= MANY for count, _ in grid or ())
    return found if is_only else None


def _rounded(value: float) -> float:
    """Return a value with four decimals, which is how normalisations are written, or six."""
    return round(value, 4 if abs(value) >= 0.05 else 6) + 0.0  # no −0
