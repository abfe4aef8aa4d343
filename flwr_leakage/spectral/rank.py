"""Compute the numerical rank of linear maps, by random combinations of their rows: the number of
independent directions of the input that change the output.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws, normal_rows

SURPLUS = 1.25
"""Number of random rows that are drawn for each dimension of a matrix's rank. With as many rows as
the rank, randomness alone can make a singular value of the rows small. With 1.25 times as many it
does not."""


@dataclass(frozen=True)
class NumericalRank:
    """The numerical rank of each of S matrices, or a lower bound of it.

    Attributes:
        rank: (S,) number of singular values above the tolerance, or a lower bound of this number.
        resolved: (S,) whether ``rank`` is that number. If not, it is a lower bound, as all
            combinations of rows that were drawn are independent.
        least_seen: (S,) smallest singular value above the tolerance, relative to the largest.
        most_unseen: (S,) largest singular value up to the tolerance, relative to the largest; 0 if
            there is none.
    """

    rank: Int[Tensor, " S"]
    resolved: Bool[Tensor, " S"]
    least_seen: Float[Tensor, " S"]
    most_unseen: Float[Tensor, " S"]


def rows_needed(num_inputs: int, num_outputs: int) -> int:
    """Return the largest number of products that ``numerical_rank`` takes for one matrix (P, N).

    Args:
        num_inputs: N.
        num_outputs: P.
    """
    return min(num_outputs, math.ceil(SURPLUS * num_inputs) + 8)


def numerical_rank(
    operator: LinearOperator, draws: Draws, tolerance: float, max_rows: int
) -> NumericalRank:
    """Return the number of singular values of A ∈ R^{P×N} above ``tolerance`` times the largest.

    It is computed from random rows uᵀA with Gaussian u. With probability 1, m of them have the rank
    min(m, rank A) (Halko, Martinsson and Tropp 2011). If there are 1.25 times as many rows as the
    rank (``SURPLUS``), small singular values separate from zero. Rows are added until they are
    dependent, which gives the rank, or until there are ``max_rows``, which gives a lower bound. If
    A itself has no more rows than would be needed, its own rows are taken.

    Args:
        operator: S matrices A in float64, as rounding in float32 hides small singular values.
        draws: the generator of u for all matrices, or one generator for each.
        tolerance: share of the largest singular value, in (0, 1).
        max_rows: largest number of products for each matrix, ≥ 1.

    Raises:
        ValueError: the operator works in float32, or a setting is out of range.
    """
    if operator.dtype != torch.float64:
        raise ValueError(f"a numerical rank needs a float64 operator, got {operator.dtype}.")
    if not 0 < tolerance < 1 or max_rows < 1:
        raise ValueError(
            f"tolerance must lie in (0, 1) and max_rows be at least 1, got {tolerance} and "
            f"{max_rows}."
        )
    blocks, outputs = operator.num_blocks, operator.num_outputs
    needed = rows_needed(operator.num_inputs, outputs)
    whole = outputs == needed <= max_rows
    limit = min(max_rows, needed)
    rows: list[Tensor] = []
    goal = limit if whole else min(32, limit)
    while True:
        while len(rows) < goal:
            if whole:
                vector = torch.zeros(blocks, outputs, dtype=operator.dtype, device=operator.device)
                vector[:, len(rows)] = 1
            else:
                vector = normal_rows((blocks, outputs), draws).to(operator.device)
            rows.append(operator.rmatvec(vector))
        values = torch.linalg.svdvals(torch.stack(rows, 1))
        found = _count(values, tolerance)
        dependent = SURPLUS * found.rank <= goal
        if goal == limit:
            resolved = dependent | (limit == needed)
            return NumericalRank(found.rank, resolved, found.least_seen, found.most_unseen)
        if bool(dependent.all()):
            return found
        goal = min(limit, 2 * goal)


def _count(values: Float[Tensor, "S M"], tolerance: float) -> NumericalRank:
    """Return the numerical ranks of S matrices, marked as resolved: the number of singular values
    above ``tolerance`` times the largest. ``values`` (S, M) are all singular values, descending. A
    matrix of zeros has rank 0.
    """
    relative = values / values[:, :1].clamp_min(torch.finfo(values.dtype).tiny)
    seen = relative > tolerance
    least = torch.where(seen, relative, torch.inf).amin(1)
    most = torch.where(seen, 0.0, relative).amax(1)
    return NumericalRank(seen.sum(1), torch.ones_like(seen[:, 0]), least, most)
