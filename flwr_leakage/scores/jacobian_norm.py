"""Measure the norms of the Jacobian of a sample's gradient by its input."""

from dataclasses import dataclass

import torch

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.scores.base import (
    Column,
    SampleScore,
    mean_of_squares,
    numbers_of,
    root_error,
)
from flwr_leakage.spectral.estimate import orthogonalize


@dataclass(frozen=True)
class JacobianNorm(SampleScore):
    """A score: the norms ‖J‖₂ = √λmax and ‖J‖_F = √Σλᵢ of the Jacobian J of a sample's gradient.

    J = ∇ₓ∇_θL ∈ R^{N×P}, and λᵢ are the eigenvalues of JJᵀ.

    The norms say how much the update changes with the input. Noise of a fixed strength hides a
    sample with a larger norm less. The Lanczos vectors Q that are computed for λmax give a part of
    ‖J‖_F² exactly, ‖JᵀQ‖_F². The rest of ‖J‖_F² is E‖Jᵀ(I − QQᵀ)z‖² over vectors z of random signs
    (Hutchinson 1990; Meyer et al. 2021). The error bar follows from the variance over z.

    Attributes:
        num_probes: the number of vectors z, of one Jacobian product each.
        tolerance: the relative error to which λmax is computed.
        max_steps: the largest number of products with JJᵀ in the search for λmax.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.num_probes < 2:
            raise ValueError(f"num_probes must be at least 2, got {self.num_probes}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``jacobian_norm`` (‖J‖₂) and ``jacobian_frobenius_norm`` (‖J‖_F), with
        J the Jacobian of each sample's gradient.
        """
        found = problem.largest(self.tolerance, self.max_steps)
        top = numbers_of(found.estimate, "at least", "λmax")
        squares = []
        for _ in range(self.num_probes):
            signs = sign_rows(problem.inputs.shape, draws).to(problem.inputs)
            image = problem.operator.matvec(orthogonalize(signs, found.basis))
            squares.append((image.double() ** 2).sum(1))
        mean, width = mean_of_squares(torch.stack(squares))
        total = found.trace + mean
        widths = width + 2 * problem.rounding * total
        frobenius, errors = total.sqrt(), root_error(total, widths)
        relative = errors / frobenius.clamp_min(1e-300)
        remarks = [f"error bar of {e:.0%}" if e > 0.1 else "" for e in relative.tolist()]
        name = "jacobian_frobenius_norm"
        root = top._replace(values=top.values.sqrt(), errors=root_error(top.values, top.errors))
        return [
            root.column("jacobian_norm", "1", "larger leaks more"),
            Column(name, frobenius, "1", "larger leaks more", remarks, errors, "within tolerance"),
        ]
