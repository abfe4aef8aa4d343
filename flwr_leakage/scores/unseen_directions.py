"""Count the directions of an input that its gradient does not determine."""

from dataclasses import dataclass, field

import torch

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.spectral import numerical_rank, rows_needed


@dataclass(frozen=True)
class UnseenDirections(SampleScore):
    """A score: N − rank J, the number of input directions along which the gradient does not change.

    J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of the gradient of a sample with N inputs.

    To first order, no attack on the gradient can distinguish inputs that differ only in these
    directions; its result along them comes from its prior. There are many such directions if ReLUs
    are inactive or P < N. A value of zero does not by itself mean safe or unsafe: see
    ``InversionInfluence`` for how well noise hides the other directions. The score costs 1.25 N
    Jacobian products, fewer if the rank is small.

    Attributes:
        tolerance: singular values below this share of the largest count as zero, in (0, 1).
        max_products: the largest number of products for a sample, ≥ 1; if more are needed there is
            no number, and the note has a bound.
        precision: must be ``float64``.
    """

    tolerance: float = 1e-8
    max_products: int = 4000
    precision: Precision = field(default="float64", kw_only=True)

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes for one sample: twice those of the products from which the rank is
        found, as their SVD needs a copy.
        """
        rows = min(self.max_products, rows_needed(num_inputs, num_parameters))
        return 2 * 8 * rows * num_inputs

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``unseen_directions``: N − rank J for the Jacobian J of each sample."""
        found = numerical_rank(problem.operator, draws, self.tolerance, self.max_products)
        unseen = (problem.operator.num_inputs - found.rank).double()
        notes = [
            "" if resolved else f"unresolved: at most {count:.0f} (random rows)"
            for resolved, count in zip(found.resolved.tolist(), unseen.tolist(), strict=True)
        ]
        values = torch.where(found.resolved, unseen, torch.nan)
        return [Column("unseen_directions", values, "input directions", "larger is safer", notes)]
