"""Fit an input to known features of a ReLU network, with a preference for smooth images.

After the fit, wrong signs of preactivations near zero are repaired (:func:`settle_signs`). If a
fitted input is right to 1e-6, one preactivation out of millions still lies within 1e-6 of zero. If
its sign is wrong, the gradient is off by far more than the input's error explains: on a ResNet-18
by 1e-6 to 1e-4 in relative squared distance. Inputs drawn within 1e-6 of the fitted one have either
sign by chance. A drawn input whose gradient meets the observed gradient has all signs right, and is
as near to the truth as the fitted one.

Through many ReLUs a fit gets stuck unless it starts near the solution. So the first candidate of a
fit to pooled features is predicted by a regression: a linear map of the 3×3 features around a
position predicts the block of pixels under it. The attacker learns the map from synthetic images
that it passes through the network. They are noise whose amplitudes fall as f^−1.5 with the
frequency f; those of natural images fall about as 1/f (Field 1987). So no data are needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch, InputSpec


@dataclass(frozen=True)
class Fit:
    """The input at which a fit ended, with the fit's cost in iterations and evaluations.

    The cost includes that of earlier fits whose end was the start of this fit.

    Attributes:
        inputs: (1, C, H, W) the fitted input of the network, normalised.
        value: the minimised function at this input.
        iterations: number of the optimizer's steps.
        evaluations: number of computations of the function and its gradient.
    """

    inputs: Tensor
    value: float
    iterations: int = 0
    evaluations: int = 0


def fit_features(
    problem: Problem,
    features: Features,
    start: Fit,
    weight: float,
    optimizer: LBFGS,
    budget: Budget = UNLIMITED,
) -> Fit:
    """Return the fit of an input to known features of a network and to equations about features.

    The fit minimises a sum of three parts: the :func:`feature_distance` of each known layer output,
    weighted by :meth:`Features.weight`; the :func:`equation_distance` of each set of equations; and
    ``weight`` times the input's :func:`smooth_variation`. It begins at ``start``, and ends when the
    optimizer stops or the budget is spent.
    """
    shape, deepest = start.inputs.shape, max([*features.outputs, *features.equations])

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs = points.reshape(shape).detach().requires_grad_()
        walk = ReluWalk(problem, inputs, last=deepest, pooled=features.windows)
        distances = [
            features.weight(number) * feature_distance(walk.compared(number), known)
            for number, known in features.outputs.items()
        ]
        distances += [
            equation_distance(walk.compared(number), known)
            for number, known in features.equations.items()
        ]
        value = torch.stack(distances).sum()
        if weight:
            value = value + weight * smooth_variation(inputs)
        (gradient,) = torch.autograd.grad(value, inputs)
        return value.detach().reshape(1), gradient.reshape(1, -1)

    def project(points: Tensor) -> Tensor:
        return problem.spec.clamp(points.reshape(shape)).reshape(1, -1)

    found = optimizer(evaluate, start.inputs.reshape(1, -1), project, budget=budget)
    return Fit(
        found.points.reshape(shape),
        float(found.values[0]),
        start.iterations + int(found.iterations[0]),
        start.evaluations + int(found.evaluations[0]),
    )


def feature_distance(preactivations: Tensor, known: Tensor) -> Tensor:
    """Return the squared distance of preactivations from known ReLU outputs, over ``‖known‖²``.

    ``preactivations`` and ``known`` have the same shape. A positive output equals the
    preactivation. A zero output only means that the preactivation is not positive. So where the
    output is zero, only positive preactivations count.
    """
    residual = torch.where(known > 0, preactivations - known, preactivations.clamp_min(0))
    return residual.square().sum() / known.square().sum()


def equation_distance(preactivations: Tensor, known: Whitened) -> Tensor:
    """Return the squared residual of linear equations about ReLU outputs, over ``‖values‖²``.

    The outputs are the ReLU of ``preactivations`` (1, C, H, W). ``known`` holds the equations,
    whose right-hand sides are ``values``.
    """
    residual = known.residual(preactivations.clamp_min(0))
    return residual.square().sum() / known.values.square().sum()


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Return the smoothed total variation of images (B, C, H, W), a scalar.

    It is the mean of √(d² + kink²) over the differences d of vertical neighbours, plus the same
    mean over horizontal neighbours. Differences far below ``kink`` > 0 count by their square,
    larger ones by their size.
    """
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )


def settle_signs(
    problem: Problem,
    batch: Batch,
    errors: Sequence[float],
    met: float,
    draws: int,
    generator: torch.Generator,
    budget: Budget,
) -> tuple[Batch, float]:
    """Return the input near a given one whose gradient is nearest to the observed gradient.

    Inputs are drawn at random around the given one, up to ``draws`` times. A draw may flip signs of
    preactivations near zero. ``batch`` holds the given input and its label. ``errors`` are standard
    deviations that the given input's error may have, relative to the root mean square of the input;
    the draws use them in turn. The draws end once the distance that is returned is at most ``met``,
    or the budget is spent.

    Returns:
        The input with its label, and the squared distance of its gradient from the observed one,
        relative to the squared norm of the observed gradient.
    """
    best, least = batch, gradient_distance(problem, batch)
    scale = batch.inputs.square().mean().sqrt()
    for draw in range(draws):
        if least <= met or budget.is_spent:
            break
        noise = torch.randn(batch.inputs.shape, generator=generator).to(batch.inputs)
        inputs = batch.inputs + errors[draw % len(errors)] * scale * noise
        tried = Batch(inputs, batch.targets)
        distance = gradient_distance(problem, tried)
        if distance < least:
            best, least = tried, distance
    return best, least


def noise_images(spec: InputSpec, count: int, generator: torch.Generator) -> Tensor:
    """Return pixels (count, C, H, W) in [0, 1] of noise with random contrast and mean.

    Amplitudes are proportional to f^−1.5 at frequency f. Each channel's own noise has 0.4 of the
    standard deviation of the noise that all channels share.
    """
    channels, height, width = spec.shape
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
    amplitude = frequency.clamp_min(1 / max(height, width)) ** -1.5

    def noise(number: int) -> Tensor:
        white = torch.randn(count, number, height, width, generator=generator)
        images = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(height, width))
        return images / images.std((2, 3), keepdim=True)

    contrast = 0.05 + 0.3 * torch.rand(count, 1, 1, 1, generator=generator)
    mean = 0.2 + 0.6 * torch.rand(count, 1, 1, 1, generator=generator)
    mean = mean + 0.1 * torch.randn(count, channels, 1, 1, generator=generator)
    return (mean + contrast * (noise(1) + 0.4 * noise(channels))).clamp(0, 1)


def read_input(
    features: Callable[[Tensor], Tensor],
    known: Tensor,
    spec: InputSpec,
    count: int,
    generator: torch.Generator,
    ridge: float = 1e-3,
) -> Tensor:
    """Return the normalised input (1, C, H, W) that ridge regression predicts from features.

    The regression learns from ``count`` synthetic images.

    Args:
        features: map from normalised inputs to features (B, N, H', W'), with H' ≤ H and W' ≤ W.
        known: the features (1, N, H', W') of the input sought.
        spec: the shape and the normalisation of inputs.
        count: number of synthetic images, ≥ 1.
        generator: the random stream for these images.
        ridge: weight of the penalty on the squared coefficients, as a share of the mean diagonal
            entry of the regression's Gram matrix.

    Raises:
        ValueError: count is less than 1, or the features have more positions than the input.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    height, width = spec.shape[1:]
    rows, columns = known.shape[2:]
    block = (height // rows, width // columns)
    if 0 in block:
        raise ValueError(f"features at {rows}×{columns} positions of {height}×{width} pixels.")
    # The blocks of pixels under the features may leave pixels at the border uncovered. So the patch
    # that is predicted extends beyond its block on all sides.
    margin = (block[0] - 1, block[1] - 1)
    patch = (block[0] + 2 * margin[0], block[1] + 2 * margin[1])
    canvas = (rows * block[0] + 2 * margin[0], columns * block[1] + 2 * margin[1])
    right, below = canvas[1] - width - margin[1], canvas[0] - height - margin[0]

    def design(maps: Tensor) -> Tensor:
        around = F.unfold(maps, 3, padding=1).mT.flatten(0, 1)
        return F.pad(around, (0, 1), value=1.0)

    images = spec.normalize(noise_images(spec, count, generator)).to(known.dtype)
    gram: Tensor | float = 0.0
    moments: Tensor | float = 0.0
    for batch in images.split(25):
        with torch.no_grad():
            regressors = design(features(batch))
        around = F.pad(batch, (margin[1], right, margin[0], below), mode="replicate")
        pixels = F.unfold(around, patch, stride=block).mT
        gram = gram + (regressors.T @ regressors).double()
        moments = moments + (regressors.T @ pixels.flatten(0, 1)).double()
    assert isinstance(gram, Tensor)
    damping = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    reading = torch.linalg.solve(gram + damping, moments).to(known.dtype)
    patches = (design(known) @ reading).T[None]
    total = F.fold(patches, canvas, patch, stride=block)
    overlaps = F.fold(torch.ones_like(patches), canvas, patch, stride=block)
    found = (total / overlaps)[..., margin[0] :, margin[1] :][..., :height, :width]
    return spec.clamp(found)
