"""Lipschitz and angular Lipschitz constants of the gradient: black-box measures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Direction, Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    measurement,
    sample_problems,
)

Oracle = Callable[[Tensor], Tensor]
"""Inputs (S, N) ↦ gradients (S, P); all that a black-box score is given."""


def one_minus_cosine(
    left: Float[Tensor, "S D"], right: Float[Tensor, "S D"]
) -> Float[Tensor, " S"]:
    """1 − cos of the angle between rows, without the cancellation at small angles."""
    difference = F.normalize(left, dim=1) - F.normalize(right, dim=1)
    return (difference**2).sum(1) / 2


def lipschitz_constants(
    oracle: Oracle,
    inputs: Float[Tensor, "S N"],
    generator: torch.Generator,
    noise_std: float = 1e-3,
    num_draws: int = 1000,
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """L̃ and L̃cos of a gradient oracle around each input.

    L̃ = maxₙ ‖g(x + n) − g(x)‖/‖n‖ and L̃cos = maxₙ (1 − cos(g(x + n), g(x)))/(1 − cos(x + n, x))
    over ``num_draws`` draws of n ~ N(0, noise_std²). Both are lower bounds of the constants: a
    random direction in N dimensions sees about the root mean square of the spectrum, not λmax.

    Args:
        oracle: inputs (S, N) ↦ gradients (S, P). One row may be a flattened batch.
        inputs: x.
        generator: for n.
        noise_std: in the units of the inputs.
        num_draws: oracle calls, besides one at x.

    Returns:
        L̃ and L̃cos, (S,) each; NaN where g(x) or x is zero and has no direction.
    """
    if noise_std <= 0 or num_draws < 1:
        raise ValueError(
            f"noise_std must be positive and num_draws at least 1, got {noise_std}, {num_draws}."
        )
    base = oracle(inputs)
    lipschitz = torch.zeros(inputs.shape[0], dtype=base.dtype)
    angular = torch.zeros(inputs.shape[0], dtype=base.dtype)
    for _ in range(num_draws):
        noise = noise_std * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
        moved = oracle(inputs + noise)
        ratio = torch.linalg.vector_norm(moved - base, dim=1)
        lipschitz = torch.maximum(lipschitz, ratio / torch.linalg.vector_norm(noise, dim=1))
        turn = one_minus_cosine(moved, base) / one_minus_cosine(inputs + noise, inputs)
        angular = torch.maximum(angular, turn)
    directed = (base != 0).any(1) & (inputs != 0).any(1)
    return lipschitz, torch.where(directed, angular, torch.nan)


@dataclass(frozen=True)
class Lipschitz:
    """L̃ and L̃cos of every sample's gradient (angular Lipschitz constant: scale-free).

    Needs gradients only, so it also works where second derivatives do not. A smaller constant
    means a flatter gradient, along which the attacker's loss drops faster: larger is safer.
    In float64, as the cosines differ from 1 by about noise_std² only.

    Attributes:
        noise_std: see ``lipschitz_constants``.
        num_draws: gradients of each sample.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    noise_std: float = 1e-3
    num_draws: int = 1000
    point: Point = "defended"
    precision: Precision = "float64"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """``lipschitz`` and ``angular_lipschitz``."""
        lipschitz: list[float | None] = []
        angular: list[float | None] = []
        lipschitz_notes: list[str] = []
        angular_notes: list[str] = []
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            plain, turned = lipschitz_constants(
                problem.oracle, problem.inputs, generator, self.noise_std, self.num_draws
            )
            for sample, sound in enumerate(problem.sound):
                note = problem.notes[sample]
                lipschitz.append(float(plain[sample]) if sound else None)
                lipschitz_notes.append(note)
                directed = bool(turned[sample].isfinite())
                angular.append(float(turned[sample]) if sound and directed else None)
                angular_notes.append(note or ("" if directed else "no direction: g or x is zero"))
        safer: Direction = "larger is safer"
        return [
            measurement("lipschitz", lipschitz, lipschitz_notes, "1", safer, 0),
            measurement("angular_lipschitz", angular, angular_notes, "1", safer, 0),
        ]
