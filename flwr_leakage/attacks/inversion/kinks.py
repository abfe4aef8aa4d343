"""Whether a network's derivative jumps: by the functions that a pass calls, and by its numbers."""

import torch
from torch import Tensor

from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import has_kinks as names_kinks
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.network.trace import Step
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.spectral.image_prior import ImagePrior

LINES, POINTS = 3, 33
"""Lines between images of the prior, and points on a line."""

LENGTHS = (1 / 8, 1.0)
"""Of a line, in units of the distance of its ends: steep activations are smooth on the short one
only, and few ReLUs flip on the long one only."""

FLAT = 1e-9
"""Second differences of logits, in units of the largest logit, up to which a line tells nothing."""

ROUGH = 0.7
"""Root mean square of fourth differences, in units of second ones, beyond which there are kinks:
2.4 where second differences are independent."""


def has_kinks(problem: Problem) -> bool:
    """Whether the derivative of the logits by the inputs jumps: by names or, else, by numbers."""
    return calls_kinks(problem) or is_rough(problem)


def calls_kinks(problem: Problem) -> bool:
    """Whether a forward pass of a grey image meets kinks that can be blurred, by their names.

    These are ReLUs, leaky or not, max pooling, and other activations with a kink among their inputs
    there: those of hardswish at ±3 are far from what most networks meet.
    """
    grey = torch.full((1, *problem.spec.shape), 0.5)
    inputs = problem.spec.normalize(grey).to(next(iter(problem.params.values())))
    with torch.no_grad():
        return any(_meets_kink(step) for step in traced(problem, inputs).steps)


def _meets_kink(step: Step) -> bool:
    if not isinstance(step.op, Elementwise):
        return names_kinks(step.op)
    least, most = float(step.inputs.min()), float(step.inputs.max())
    return any(least <= place <= most for place, _ in step.op.activation.kinks)


def is_rough(problem: Problem) -> bool:
    """Whether logits have kinks along lines between images of the prior, however they come about.

    At steps h second differences of a smooth function are h² f'', fourth ones h⁴ f''''. At a kink
    both are h times the jump of f'. So fourth differences are far below second ones, or as large.

    So every kink is told, as that of ReLU6, ``abs`` or a maximum, by any spelling. It costs up to
    198 forward passes. Not seen are kinks that these images do not meet, such as hardswish's at ±3,
    and those that have less than a tenth of the second differences' squares, as a few among many
    smooth units. Activations whose second derivative jumps, as that of ELU, count as smooth. Those
    so steep that they change within a few hundredths of the way between two images do not, nor do
    networks that compute in single precision whatever they are given.
    """
    problem = problem.to(torch.float64)  # in single precision rounding is as rough
    prior = ImagePrior.of(problem.spec)
    stream = torch.Generator().manual_seed(0)
    draws = torch.randn(2, LINES, *problem.spec.shape, generator=stream, dtype=torch.float64)
    images = problem.spec.clamp(prior.grey + prior.push(draws.flatten(0, 1)))
    starts, ends = images.reshape(draws.shape)
    for length in LENGTHS:
        steps = torch.linspace(0, length, POINTS, dtype=torch.float64).reshape(-1, 1, 1, 1)
        lines = [start + steps * (end - start) for start, end in zip(starts, ends, strict=True)]
        logits = torch.stack([_logits(problem, line) for line in lines])
        second = logits.diff(n=2, dim=1)
        if float(second.abs().max()) > FLAT * float(logits.abs().max()):
            fourth = second.diff(n=2, dim=1)
            return float(fourth.square().mean()) > ROUGH**2 * float(second.square().mean())
    return False


def _logits(problem: Problem, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return problem.gradient_map.logits(problem.params, inputs, problem.buffers)
