"""Count the directions of an input that its gradient does not determine."""

from dataclasses import dataclass, field

import torch

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.spectral import numerical_rank, rows_needed


@dataclass(frozen=True)
class UnseenDirections(SampleScore):
    """N − rank J with J = ∇ₓ∇_θL ∈ R^{N×P}: along these the gradient stays the same.

    To first order no attack on the gradient can tell inputs apart that differ in these directions
    only, and what it puts there comes from its prior. There are many such directions where ReLUs
    are inactive or P < N. Zero does not mean safe or unsafe by itself: see ``inversion_influence``
    for how firmly the other directions are seen. The score costs 1.25 N products, fewer where the
    rank is small.

    Attributes:
        tolerance: singular values below this share of the largest count as zero, in (0, 1).
        max_products: most products of a sample, ≥ 1; with fewer than needed there is no number but
            a bound in the note.
        precision: must be ``float64``.
    """

    tolerance: float = 1e-8
    max_products: int = 4000
    precision: Precision = field(default="float64", kw_only=True)

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the memory of the rows, twice for their singular values."""
        rows = min(self.max_products, rows_needed(num_inputs, num_parameters))
        return 2 * 8 * rows * num_inputs

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``unseen_directions``."""
        found = numerical_rank(problem.operator, draws, self.tolerance, self.max_products)
        unseen = (problem.operator.num_inputs - found.rank).double()
        notes = [
            "" if resolved else f"unresolved: at most {count:.0f} (random rows)"
            for resolved, count in zip(found.resolved.tolist(), unseen.tolist(), strict=True)
        ]
        values = torch.where(found.resolved, unseen, torch.nan)
        return [Column("unseen_directions", values, "input directions", "larger is safer", notes)]
