"""Choose the contrast of images whose gradient does not depend on it.

If the first convolution of a network is followed by a normalisation by statistics of its own input,
the network computes the same from x and from s x, up to the normalisation's ε, and so does its
gradient. So no update shows the contrast of an image, and a prior of images alone would make it
almost grey. But pixels are bounded, and most photographs reach the bounds. So attacks assume the
largest contrast that keeps almost all pixels within the bounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import Problem, simulate_rounds
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior

INVARIANT = 0.1
"""Relative change of each tensor's gradient up to which it counts as the same when contrast, a
factor of the input, grows by a quarter. On development draws, the normalisation's ε caused a change
of 1e-4, and a ReLU near its kink one of 0.008. Where the gradient depends on contrast, that of the
first weights changes by about a quarter; no results are kept."""

OUTSIDE = 5e-4
"""Share of an image's pixel values that may leave [0, 1], as a candidate has errors. Among 3,072
values that is one. For 200 images of CIFAR-10 that are exact but for their contrast, the assumed
contrast gave a median PSNR of 55 dB; no results are kept."""


@dataclass(frozen=True)
class Contrast:
    """The contrasts of a batch's samples that a gradient does not determine.

    The contrast of a sample is a factor s of its network input x, where x = 0 is the mean colour.

    Attributes:
        spec: the normalisation of inputs and the bounds of pixels.
        unknown: ``each`` if every sample may be scaled by a factor of its own without a change of
            the gradient, ``common`` if only all samples by the same factor, ``none`` if no factor
            leaves the gradient as it is.
    """

    spec: InputSpec
    unknown: Literal["each", "common", "none"] = "none"

    @classmethod
    def of(cls, problem: Problem) -> "Contrast":
        """Return which contrasts, factors of the inputs, a problem's gradient does not determine.

        The gradient is computed at random images of the prior, and again with more contrast. If
        pixels have no bounds (``spec.box`` is false), ``unknown`` is ``none``.
        """
        spec = problem.spec
        if not spec.box:
            return cls(spec)
        generator, prior = torch.Generator().manual_seed(0), ImagePrior.of(spec)
        shape = (problem.num_samples, *spec.shape)
        inputs = spec.clamp(prior.inputs(torch.randn(shape, generator=generator)))
        inputs = inputs.to(problem.like)
        targets = torch.zeros(len(inputs), dtype=torch.int64)
        sizes = [value.numel() for posed in problem.rounds for value in posed.gradient.values()]
        first = next(name for name in problem.gradient if name in problem.gradient_map.trained)

        def logits(scaled: Tensor) -> Sequence[Tensor]:
            return [problem.logits(scaled)]

        def beginning(scaled: Tensor) -> Sequence[Tensor]:
            return [problem.gradient_of([first], Batch(scaled, targets))[first]]

        def gradient(scaled: Tensor) -> Sequence[Tensor]:
            return simulate_rounds(problem, Batch(scaled, targets)).split(sizes)

        with torch.no_grad():
            for seen in (logits, beginning, gradient):  # mostly, logits already show the contrast
                own = seen(inputs)
                if not _are_near(seen(1.25 * inputs), own):
                    return cls(spec)
            each = gradient(_scaled(inputs, 1.25 ** torch.arange(1, len(inputs) + 1)))
        return cls(spec, "each" if _are_near(each, own) else "common")

    @property
    def note(self) -> str:
        """Return ``", contrast assumed"`` if some contrast is unknown, else an empty string.

        The text ends the summary of an attack's result.
        """
        return "" if self.unknown == "none" else ", contrast assumed"

    def stretched(self, inputs: Tensor) -> Tensor:
        """Return inputs (B, C, H, W), each times its largest factor with pixels in [0, 1].

        The gradient of this network does not depend on these factors, or on one that is common to
        all images of the batch. Inputs of known contrast are returned as they are.
        """
        if self.unknown == "none":
            return inputs
        factors = largest_factors(self.spec, inputs)
        if self.unknown == "common":
            factors = factors.min().expand_as(factors)
        return _scaled(inputs, factors)

    def gauged(self, prior: ImagePrior, point: Tensor) -> Tensor:
        """Return coordinates (B, C, H, W) of given images, scaled to the largest contrast.

        ``point`` holds the images' coordinates under the prior, which maps them to network inputs.
        Pixels of the scaled images just reach their bounds, and the gradient stays the same.
        Coordinates of images of known contrast are returned as they are.
        """
        if self.unknown == "none":
            return point
        inputs = self.stretched(prior.inputs(point))
        return prior.coordinates(inputs).to(point)


def largest_factors(spec: InputSpec, inputs: Tensor) -> Tensor:
    """Return for each of B samples the largest factor of its input that keeps its pixels in [0, 1].

    A share of 5e-4 (``OUTSIDE``) of the pixels may leave this range. No input (C, H, W) may be 0
    everywhere. ``spec`` is the normalisation, which maps pixels to inputs.

    Example:
        >>> spec = InputSpec((1, 1, 2), 10, (0.5,), (1.0,))
        >>> largest_factors(spec, torch.tensor([[[[0.1, -0.25]]]]))
        tensor([2.])
    """
    lower, upper = spec.bounds(inputs)
    edges = torch.where(inputs > 0, upper, lower)
    limits = torch.where((inputs == 0) | (edges == 0), math.inf, edges / inputs)
    allowed = int(OUTSIDE * inputs[0].numel())
    return limits.flatten(1).sort().values[:, allowed]


def _scaled(inputs: Tensor, factors: Tensor) -> Tensor:
    return inputs * factors.to(inputs).reshape(-1, 1, 1, 1)


def _are_near(found: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Return whether tensors changed by at most 10 % (``INVARIANT``), from ``own`` to ``found``.

    The change of each tensor is measured by its norm. Differences up to 1e-9 of the norm of all
    tensors are allowed, too, as some gradients are zero up to rounding.
    """
    rounding = 1e-9 * float(torch.cat([each.flatten() for each in own]).norm())
    return all(
        float((other - each).norm()) <= INVARIANT * float(each.norm()) + rounding
        for other, each in zip(found, own, strict=True)
    )
