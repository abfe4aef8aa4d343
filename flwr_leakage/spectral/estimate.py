"""Define the result of estimators, and the operations that they share."""

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.operators.lengths import row_norms


@dataclass(frozen=True)
class Estimate:
    """An estimate of one number for each of S matrices, with its convergence.

    Attributes:
        value: (S,) the estimates; where ``converged`` is false, a value is a bound at best.
        converged: (S,) whether the value is within the tolerance that was asked for.
        residual: (S,) relative error of the value, including rounding; an estimate, maybe too
            small, where ``converged`` is false.
        products: number of products with a matrix or its transpose, for each matrix.
        method: the name of the method that computed the value.
    """

    value: Float[Tensor, " S"]
    converged: Bool[Tensor, " S"]
    residual: Float[Tensor, " S"]
    products: int
    method: str


P = TypeVar("P", bound="Process")


class Process:
    """A base class of iterations on S matrices at once, which holds one entry for each matrix.

    Each attribute is a tensor of S rows, a list of such tensors, ``None``, or an object with a
    method ``narrow``, such as a :class:`~flwr_leakage.operators.LinearOperator`.
    """

    def narrow(self: P, rows: Int[Tensor, " R"]) -> P:
        """Return the iteration for some of the matrices, which continues where this one stands.

        Args:
            rows: (R,) indices of these matrices among the S, ascending.
        """
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(other, name, [entry[rows] for entry in value])
            elif value is not None:
                is_tensor = isinstance(value, Tensor)
                setattr(other, name, value[rows] if is_tensor else value.narrow(rows))
        return other


def normalize_rows(vectors: Float[Tensor, "S N"]) -> tuple[Tensor, Tensor]:
    """Return the rows (S, N) scaled to length 1, or zero if they are zero, and their original
    lengths (S,).
    """
    lengths = row_norms(vectors)
    return vectors / torch.where(lengths > 0, lengths, 1.0)[:, None], lengths


def orthogonalize(
    vectors: Float[Tensor, "S N"], basis: Float[Tensor, "S k N"]
) -> Float[Tensor, "S N"]:
    """Return S vectors (S, N) without their components along the vectors of ``basis``. Each of the
    S vectors has k basis vectors of its own, which are orthonormal or zero. Components are removed
    twice, because of rounding.
    """
    for _ in range(2):
        along = torch.bmm(basis, vectors[:, :, None])
        vectors = vectors - torch.bmm(along.transpose(1, 2), basis)[:, 0]
    return vectors


def remaining_growth(history: list[Tensor]) -> Tensor:
    """Return an estimate (S,) of how much S growing sequences will still grow, relative to their
    last entries: the growth over the last quarter of ``history`` (three at least). The estimate is
    right for a sequence whose distance from its limit halves over that quarter. It is too large for
    a faster sequence, and infinite for three or fewer entries.

    Example:
        >>> history = [torch.tensor(1 - 0.5**k, dtype=torch.float64) for k in range(20)]
        >>> bool(remaining_growth(history) >= 0.5**19)
        True
    """
    window = max(3, len(history) // 4)
    last = history[-1]
    if len(history) <= window:
        return torch.full_like(last, torch.inf)
    growth = torch.stack([(last - earlier).abs() for earlier in history[-1 - window :]]).amax(0)
    return growth / last.abs().clamp_min(torch.finfo(last.dtype).tiny)
