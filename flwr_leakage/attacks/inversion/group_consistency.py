"""Group consistency, which pulls the restarts of one target towards their mean."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_leakage.attacks.optimizers.base import Evaluate


def aligned(
    batches: Float[Tensor, "R B N"], labels: Tensor | None
) -> tuple[Float[Tensor, "R B N"], Tensor]:
    """Return batches with samples of equal label in the order of the first batch.

    A gradient is symmetric in samples of one label, so that restarts may find them in different
    orders.

    Args:
        batches: (R, B, N) flattened candidates of R restarts.
        labels: (R, B) labels, or ``None`` if every sample may take every position.

    Returns:
        The batches in their new order, and the (R, B) permutations that lead to it.
    """
    first, count = batches[0], batches.shape[1]
    orders = torch.arange(count, device=batches.device).repeat(len(batches), 1)
    for row in range(1, len(batches)):
        costs = torch.cdist(first, batches[row]).square()
        if labels is not None:
            same = labels[0][:, None] == labels[row]
            costs = torch.where(same, costs, 1e3 * (1 + costs.max()))
        orders[row] = torch.as_tensor(linear_sum_assignment(costs.cpu().numpy())[1])
    return torch.stack([batch[order] for batch, order in zip(batches, orders, strict=True)]), orders


@dataclass(frozen=True)
class GroupConsistency:
    """``weight ·`` mean squared distance of a candidate from the mean of all restarts.

    This is eq. 11 and 12 of Yin et al. 2021, with the pixel-wise mean and without registration,
    which small images do not need. The mean moves with every step, so that only optimizers without
    a line search can use it. A target with a single unfinished restart has no penalty.

    Attributes:
        weight: weight relative to the objective, ≥ 0.
    """

    weight: float

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def around(
        self,
        evaluate: Evaluate,
        owner: Tensor,
        labels: Tensor | None,
        num_samples: int,
        num_inputs: int,
    ) -> Evaluate:
        """Return ``evaluate`` with the penalty added to the values and gradients.

        Args:
            evaluate: the values and gradients of rows of variables.
            owner: (R,) index of each row's target.
            labels: (R, B) labels of each row, or ``None`` if labels are variables.
            num_samples: number B of samples.
            num_inputs: number of variables at the beginning of a row that are inputs.
        """

        def evaluate_group(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            values, gradients = evaluate(points, rows)
            values, gradients = values.clone(), gradients.clone()
            for target in owner[rows].unique():
                group = (owner[rows] == target).nonzero().flatten()
                batches = points[group, :num_inputs].reshape(len(group), num_samples, -1)
                ordered, orders = aligned(batches, None if labels is None else labels[rows[group]])
                gaps = ordered - ordered.mean(dim=0)
                places = orders.argsort(dim=1)
                gaps = torch.stack([gap[place] for gap, place in zip(gaps, places, strict=True)])
                gaps = gaps.reshape(len(group), -1)
                values[group] += self.weight * gaps.square().mean(dim=1)
                gradients[group, :num_inputs] += 2 * self.weight * gaps / num_inputs
            return values, gradients

        return evaluate_group
