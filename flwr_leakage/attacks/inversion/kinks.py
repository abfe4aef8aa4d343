"""Tests of whether a network's derivative jumps, by the functions it calls and by its numbers."""

import torch

from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import has_kinks as names_kinks
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.network.trace import Step
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.spectral.image_prior import ImagePrior


def has_kinks(problem: Problem) -> bool:
    """Return whether the derivative of the logits by the inputs jumps, by names or by numbers."""
    return calls_kinks(problem) or is_rough(problem)


def calls_kinks(problem: Problem) -> bool:
    """Return whether a forward pass of a grey image calls functions with kinks, by their names.

    These kinks can be blurred. They are ReLUs, leaky or not, max pooling, and other activations if
    a kink lies in the range of their inputs there. Those of hardswish at ±3 are mostly outside.
    """
    grey = torch.full((1, *problem.spec.shape), 0.5)
    inputs = problem.spec.normalize(grey).to(problem.like)
    return any(_meets_kink(step) for step in traced(problem, inputs).steps)


def _meets_kink(step: Step) -> bool:
    if not isinstance(step.op, Elementwise):
        return names_kinks(step.op)
    least, most = float(step.inputs.min()), float(step.inputs.max())
    return any(least <= place <= most for place, _ in step.op.activation.kinks)


def is_rough(problem: Problem, num_lines: int = 3, num_points: int = 33) -> bool:
    """Return whether logits have kinks along lines between images of the prior.

    For steps of length h, the second differences of a smooth function are h² f'' and the fourth
    ones h⁴ f''''. At a kink both are h times the jump of f'. So fourth differences are far below
    second ones, or as large.

    The test finds kinks of any function under any name, such as ReLU6, ``abs`` or a maximum. It
    costs up to 198 forward passes. It misses kinks outside the range of these images, such as
    hardswish's at ±3. It also misses kinks with less than a tenth of the second differences'
    squares, such as those of a few among many smooth units. Activations whose second derivative
    jumps, such as ELU, count as smooth. Activations that change within a few hundredths of the way
    between two images count as rough, and so do networks that always compute in single precision.

    Args:
        problem: the problem with the model.
        num_lines: number of lines between images of the prior.
        num_points: number of points on a line.
    """
    problem = problem.to(torch.float64)  # in single precision, rounding would look like kinks
    prior = ImagePrior.of(problem.spec)
    stream = torch.Generator().manual_seed(0)
    draws = torch.randn(2, num_lines, *problem.spec.shape, generator=stream, dtype=torch.float64)
    images = problem.spec.clamp(prior.inputs(draws.flatten(0, 1)))
    starts, ends = images.reshape(draws.shape)
    # In units of the distance of a line's ends. Steep activations are smooth on the short line
    # only. If there are few ReLUs, they flip on the long line only.
    for length in (1 / 8, 1.0):
        steps = torch.linspace(0, length, num_points, dtype=torch.float64).reshape(-1, 1, 1, 1)
        lines = [start + steps * (end - start) for start, end in zip(starts, ends, strict=True)]
        with torch.no_grad():
            logits = torch.stack([problem.logits(line) for line in lines])
        second = logits.diff(n=2, dim=1)
        # Second differences below 1e-9 of the largest logit show neither kinks nor their absence.
        if float(second.abs().max()) > 1e-9 * float(logits.abs().max()):
            fourth = second.diff(n=2, dim=1)
            # The ratio of root mean squares is 2.4 for independent second differences. The limit
            # 0.7 was chosen on development draws; no table.
            return float(fourth.square().mean()) > 0.7**2 * float(second.square().mean())
    return False
