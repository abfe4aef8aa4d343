"""List published normalisations of images, and recognise one by the values of inputs.

A pixel of 8 bits is k/255 with k = 0 … 255. So the inputs of a network lie on a grid, ``(k/255 −
mean) / std``, one for each channel. Values that lie on the grid of the true normalisation lie on
the grid of a wrong one only by chance, which is small if there are many values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.records import InputSpec

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Two tuples with one entry per channel: the mean, and the standard deviation, of pixels in [0,
1]."""

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
"""The largest level of a pixel: 255 for images of 8 bits, 16 for the digits of scikit-learn."""

WRITTEN = 2e-4
"""The largest distance of a computed pixel from its true level k/255, in units of pixels in [0, 1],
if mean and standard deviation are rounded to four decimals. It is 5e-5 · (1 + |x|), where |x| ≤ 2.7
is the largest input under ``PUBLIC``."""

LARGEST_DEVIATION = 0.15
"""The largest root mean square distance of values from the nearest level, in units of the distance
of two levels, at which values count as levels. It is about half of 1/√12 = 0.29, the value for
numbers that are spread evenly between levels."""

OUTSIDE_DEVIATIONS = 10
"""The largest distance of a value from the range of inputs of valid pixels, in standard deviations
of the value's numerical error, that counts as this error. If a value lies farther outside, the
assumed normalisation counts as wrong."""

FEW, MANY = 5, 20
"""Thresholds for the number of different pixel levels that occur in a channel. Fewer than ``FEW``
levels fit many normalisations, and confirm none. If at least ``MANY`` occur and the distances of
all have a common divisor above 1, this is no chance: the assumed levels are too fine, and the
assumed normalisation is wrong."""


def public_statistics(name: str, channels: int) -> Statistics:
    """Return the mean and the standard deviation of each channel under a public normalisation.

    Raises:
        ValueError: the table ``PUBLIC`` has no normalisation of this name, or it has another number
            of channels.
    """
    mean, std = PUBLIC.get(name, ((), ()))
    if len(mean) not in (1, channels):
        raise ValueError(
            f"the normalisation must be one of {list(PUBLIC)} that fits {channels} channels, got "
            f"{name!r}"
        )
    return (mean, std) if len(mean) == channels else (mean * channels, std * channels)


def public_specs(spec: InputSpec) -> dict[str, InputSpec]:
    """Return copies of ``spec`` with each normalisation of ``PUBLIC`` that fits its number of
    channels, keyed by the normalisation's name, such as ``CIFAR-10``.
    """
    channels = spec.shape[0]
    found = {}
    for name, (mean, _) in PUBLIC.items():
        if len(mean) in (1, channels):
            mean, std = public_statistics(name, channels)
            found[name] = replace(spec, mean=mean, std=std, box=True)
    return found


def possible_specs(spec: InputSpec) -> list[InputSpec]:
    """Return the specs under which an attack may have to try the inputs. The first is ``spec``
    itself. If its normalisation is uncertain (``known`` is false) and inputs are images of 8 bits
    (``box`` is true), ``spec`` with each other public normalisation follows. All returned specs
    have ``known`` true.
    """
    given = replace(spec, known=True)
    if spec.known or not spec.box:
        return [given]
    others = public_specs(given).values()
    return [given, *(one for one in others if not normalizations_agree(one, given))]


def public_normalization(inputs: Tensor) -> str:
    """Return the name in ``PUBLIC`` of the normalisation under which all values of inputs (B, C, H,
    W) are levels k/255 or k/16 of pixels. The result is empty if no normalisation fits, as for
    images that were interpolated. The name reveals a setting of the app's preprocessing, and no
    pixel's value.
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
    """Return whether two specs' means and standard deviations agree to 0.5/255 in each channel."""
    pairs = zip((*one.mean, *one.std), (*other.mean, *other.std), strict=False)
    return len(one.mean) == len(other.mean) and all(abs(a - b) <= 0.5 / 255 for a, b in pairs)


Claim = Literal["confirmed", "read off", "as told", "refuted", "by fit"]
"""How it is known that reconstructed inputs are pixels under some normalisation. :class:`Reading`
explains the first four. ``by fit``: the normalisation is unknown and the inputs do not show it, so
the one was chosen whose reconstruction fits the update best."""

CONFIRMED = "The values are levels of pixels under the normalisation that was told, and no other."

AS_TOLD = (
    "The pixels are right if the normalisation that the attack was told is: the values lie on no "
    "grid of levels, as after interpolation, that would show it."
)
"""The sentence for the user if inputs that are proven to be exact lie in the range of valid pixels,
but do not show whether the normalisation that the attack was told is right."""

REFUTED = (
    "The network's inputs are proven, but no pixels are: {why}. So the normalisation that the "
    "attack was told is wrong, or the inputs are no images of 8 bits; for others, such as tables "
    "and embeddings, give a spec with box=False."
)
"""The sentence for the user if inputs are proven to be exact, and contradict the normalisation that
the attack was told. ``why`` says what contradicts it."""

SEVERAL = (
    "The network's inputs are proven, but no pixels are: the inputs are levels of pixels under the "
    "normalisation that the attack was told, and under {others} too."
)
"""The sentence for the user if inputs are proven to be exact, and fit several normalisations.
``others`` are their names."""

OUTSIDE = "they lie outside of the box of valid pixels by more than their own error"
OFF_LEVELS = "they lie on a grid of levels, but not on that of the normalisation"
NO_IMAGES = "inputs in a single row or column that are no levels of pixels may be a table"


@dataclass(frozen=True)
class Reading:
    """The conclusion on the normalisation that the values of exactly recovered inputs allow.

    Attributes:
        claim: ``confirmed`` if all values are levels of pixels under the normalisation that the
            attack was told, and under no other public one; ``read off`` if the values show exactly
            one other normalisation; ``as told`` if the values speak neither for nor against the
            told one; ``refuted`` if they contradict the told one and show no other, or if they fit
            several.
        reason: the claim as a sentence for the user.
        spec: the input spec with the normalisation that is concluded, the told one for ``as told``;
            ``None`` for ``refuted``.
    """

    claim: Claim
    reason: str
    spec: InputSpec | None


def read_normalization(inputs: Tensor, told: InputSpec, error: float) -> Reading:
    """Return what the values of exactly recovered inputs (B, C, H, W) show of their normalisation.

    A pixel of 8 bits has one of 256 levels. The normalisation that was told is confirmed if all
    values are such levels under it, and under no other public one. If they are levels under exactly
    one public normalisation, and not under the one that was told, that one is read off. Values
    outside of the range of valid pixels refute the normalisation that was told; if both black and
    white occur in each channel, the right normalisation follows from their values. Values that lie
    on no grid of levels at all neither confirm nor refute the told normalisation. But if H or W is
    1, the inputs may be rows of a table, and the told normalisation counts as refuted.

    ``inputs`` are exact up to a numerical error of standard deviation ``error``. ``told`` is the
    spec that the attack was given.
    """
    values = inputs.detach().cpu().double()
    specs = {n: s for n, s in public_specs(told).items() if not normalizations_agree(s, told)}
    grids = {name: _grid(values, spec, error) for name, spec in specs.items()}
    others = [name for name, grid in grids.items() if _possible(grid)]
    own = _grid(values, told, error)
    if _possible(own) and not others:
        if _confirmed(own):
            return Reading("confirmed", CONFIRMED, told)
        # The told normalisation fits, but too few different levels occur to confirm it.
        return Reading("as told", AS_TOLD, told)
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
    """Return, for each channel of inputs (B, C, H, W), two numbers: how many different pixel levels
    occur if the normalisation is that of ``spec``, and the greatest common divisor of their
    distances. The result is ``None`` if some value is no level. ``error`` is the standard deviation
    of a value's numerical error.
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
    """Return the different pixel levels that occur in one channel's values (N,), ascending. The
    result is ``None`` if some value is no level, or if the error is too large to tell levels apart.
    ``mean`` and ``std`` are the channel's normalisation for pixels in [0, 1], ``error`` is the
    standard deviation of a value's numerical error, and ``depth`` is the largest level, such as
    255.
    """
    slack = depth * (WRITTEN + std * error)
    if slack > LARGEST_DEVIATION:
        return None
    scaled = (values * std + mean) * depth
    if float(scaled.min()) < -0.5 or float(scaled.max()) > depth + 0.5:
        return None
    levels = scaled.round().clamp(0, depth).long()
    counts = torch.bincount(levels)
    squares = torch.bincount(levels, weights=(scaled - levels).square())[counts > 0]
    # The mean is over levels, not over pixels: in some images most pixels are black, and would hide
    # the deviations of all others.
    if float((squares / counts[counts > 0]).mean().sqrt()) > slack:
        return None
    return [int(level) for level in counts.nonzero().flatten()]


def _possible(grid: list[tuple[int, int]] | None) -> bool:
    """Return whether the normalisation may be right by ``grid``, the result of :func:`_grid` for
    it. It is wrong if some value is no level, or if at least ``MANY`` levels occur in a channel and
    their distances have a common divisor above 1.
    """
    return grid is not None and all(step == 1 or count < MANY for count, step in grid)


def _confirmed(grid: list[tuple[int, int]] | None) -> bool:
    """Return whether ``grid``, the result of :func:`_grid` for a normalisation, confirms it: at
    least ``FEW`` levels occur in each channel, and their distances have no common divisor above 1.
    """
    return grid is not None and all(step == 1 and count >= FEW for count, step in grid)


def _is_on_a_grid(values: Tensor, error: float) -> bool:
    """Return whether values (N,) of one channel lie on ``MANY`` to 256 equidistant levels, of
    whatever distance, closer than chance would put them. For values of interpolated images the
    result is false. ``error`` is the standard deviation of a value's numerical error.
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
    """Return ``told`` with the normalisation by which each channel's least value is black and its
    largest white.

    The result is ``None`` unless this normalisation turns all ``values`` (B, C, H, W), exactly
    recovered inputs, into levels of pixels (multiples of 1/255, or of 1/16), and at least ``MANY``
    different levels occur in each channel, whose distances have no common divisor above 1.
    ``error`` is the standard deviation of a value's numerical error.
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
    """Return a number rounded as normalisations are written: to 4 decimals, or 6 if below 0.05."""
    return round(value, 4 if abs(value) >= 0.05 else 6) + 0.0  # adding 0 turns −0 into 0
