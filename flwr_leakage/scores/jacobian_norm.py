"""Norms of the Jacobian of the gradient map."""

from dataclasses import dataclass

import torch

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.scores.base import Column, SampleScore, numbers_of


@dataclass(frozen=True)
class JacobianNorm(SampleScore):
    """‖J‖₂ = √λmax(JJᵀ) and ‖J‖_F = √Σλᵢ, J = ∇ₓ∇_θL ∈ R^{N×P}.

    How far the update moves with the input: a larger norm drowns noise of a fixed strength.
    ‖J‖_F² = E‖Jᵀz‖² over random signs z (Hutchinson 1990): its relative standard error over
    the probes is in the note where it exceeds 10 %.

    Attributes:
        num_probes: how many z are drawn, of one product each.
        tolerance: relative error to which λmax is computed.
        max_steps: most products of JJᵀ in the search for λmax.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.num_probes < 2:
            raise ValueError(f"num_probes must be at least 2, got {self.num_probes}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """``jacobian_norm`` and ``jacobian_frobenius_norm``."""
        found = problem.largest(self.tolerance, self.max_steps)
        top, notes, widths, states = numbers_of(found.estimate, "at least", "λmax")
        squares = []
        for _ in range(self.num_probes):
            signs = sign_rows(problem.inputs.shape, draws)
            image = problem.operator.matvec(signs.to(problem.inputs))
            squares.append((image.double() ** 2).sum(1))
        stacked = torch.stack(squares)
        mean = stacked.mean(0)
        error = stacked.std(0) / self.num_probes**0.5 / mean.clamp_min(1e-300) / 2
        remarks = [f"standard error {e:.0%}" if e > 0.1 else "" for e in error.tolist()]
        return [
            Column(
                "jacobian_norm",
                top.sqrt(),
                "1",
                "larger leaks more",
                notes,
                widths / (2 * top.sqrt()).clamp_min(1e-300),
                states,
            ),
            Column("jacobian_frobenius_norm", mean.sqrt(), "1", "larger leaks more", remarks),
        ]
