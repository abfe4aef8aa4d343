"""Estimate Lipschitz and angular Lipschitz constants of a gradient from gradients alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import row_norms
from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.scores.base import Column, SampleScore, notes_where
from flwr_leakage.spectral.estimate import normalize_rows

Oracle = Callable[[Tensor], Tensor]
"""A function from S inputs (S, N) to their gradients (S, P). A black-box score may call nothing
else."""


def one_minus_cosine(
    left: Float[Tensor, "S D"], right: Float[Tensor, "S D"]
) -> Float[Tensor, " S"]:
    """Return 1 − cos (S,) of the angle between equal rows of ``left`` and ``right``, accurate also
    at small angles.
    """
    difference = normalize_rows(left)[0] - normalize_rows(right)[0]
    return (difference**2).sum(1) / 2


def lipschitz_constants(
    oracle: Oracle,
    inputs: Float[Tensor, "S N"],
    generator: Draws,
    noise_std: float = 1e-3,
    num_draws: int = 1000,
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Return estimates of the Lipschitz and the angular Lipschitz constant around each input, (S,)
    each.

    They are L̃ = maxₙ ‖g(x + n) − g(x)‖/‖n‖ and L̃cos = maxₙ (1 − cos(g(x + n), g(x)))/(1 − cos(x +
    n, x)) over draws of n ~ N(0, noise_std²), with g the gradient. Both are lower bounds: along a
    random direction, the gradient changes by about the root mean square of the Jacobian's singular
    values. L̃cos is NaN where g(x) or x is zero.

    Args:
        oracle: the function g from inputs (S, N) to gradients (S, P). One row may be a flattened
            batch.
        inputs: the inputs x as flat rows (S, N).
        generator: the generator that draws n.
        noise_std: the standard deviation of n, in the units of the inputs.
        num_draws: the number of draws, with one call of the oracle each, and another call at x.
    """
    if noise_std <= 0 or num_draws < 1:
        raise ValueError(
            f"noise_std must be positive and num_draws at least 1, got {noise_std}, {num_draws}."
        )
    base = oracle(inputs)
    lipschitz = torch.zeros(inputs.shape[0], dtype=base.dtype)
    angular = torch.zeros(inputs.shape[0], dtype=base.dtype)
    for _ in range(num_draws):
        noise = noise_std * normal_rows(inputs.shape, generator).to(inputs)
        moved = oracle(inputs + noise)
        ratio = row_norms(moved - base) / row_norms(noise)
        lipschitz = torch.maximum(lipschitz, ratio)
        turn = one_minus_cosine(moved, base) / one_minus_cosine(inputs + noise, inputs)
        angular = torch.maximum(angular, turn)
    directed = (base != 0).any(1) & (inputs != 0).any(1)
    return lipschitz, torch.where(directed, angular, torch.nan)


@dataclass(frozen=True)
class Lipschitz(SampleScore):
    """A score: the Lipschitz constant L̃ and the angular one L̃cos of a sample's gradient.

    Both are estimated from random perturbations of the input, see ``lipschitz_constants``. The
    score needs gradients only, so it also works for models without second derivatives. A larger
    constant counts as safer, as the attacker's loss falls more slowly if the gradient changes more
    with the input. Both are computed in float64, as cosines differ from 1 only by about noise_std².

    Attributes:
        noise_std: the standard deviation of the perturbation, in the units of the inputs.
        num_draws: the number of perturbations of each sample, with one gradient each.
    """

    noise_std: float = 1e-3
    num_draws: int = 1000
    precision: Precision = field(default="float64", kw_only=True)

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``lipschitz`` and ``angular_lipschitz``."""
        plain, angular = lipschitz_constants(
            problem.oracle, problem.inputs, draws, self.noise_std, self.num_draws
        )
        notes = notes_where(~angular.isfinite(), "no direction: g or x is zero")
        size = row_norms(problem.inputs).double()
        step = self.noise_std * problem.inputs.shape[1] ** 0.5
        slips = 2 * problem.rounding * row_norms(problem.gradients).double() / step
        # 1 − cos is half the squared distance of two unit vectors. So its relative error is twice
        # that of the distance.
        turns = angular.double().sqrt() * step / size.clamp_min(1e-300)
        unsure = 4 * problem.rounding * (1 / turns.clamp_min(1e-300) + size / step)
        bars = angular * unsure
        return [
            Column("lipschitz", plain, "1", "larger is safer", (), slips, "lower bound"),
            Column(
                "angular_lipschitz", angular, "1", "larger is safer", notes, bars, "lower bound"
            ),
        ]
