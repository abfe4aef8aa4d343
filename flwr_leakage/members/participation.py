"""Whose record it was, from sums of clients' updates and from who took part in which round."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.members.p_values import rank_p_values


@dataclass(frozen=True)
class Attribution:
    """To which client each record is attributed.

    Attributes:
        clients: (R,) the index of the client, for each record.
        contrasts: (R, K) the contrast of every client; the smallest is the client's.
        p_values: (R,) that the best of K clients has so small a contrast, for a record of nobody.
        margins: (R,) by how many standard deviations of a null record's contrasts the client's is
            below the next one's. 0 where two clients were in the same rounds, which nothing parts.
    """

    clients: Int[Tensor, " R"]
    contrasts: Float[Tensor, "R K"]
    p_values: Float[Tensor, " R"]
    margins: Float[Tensor, " R"]


def participation_contrasts(
    log_residuals: Float[Tensor, "T R"], took_part: Bool[Tensor, "T K"]
) -> Float[Tensor, "R K"]:
    """Return each record's mean log-residual over rounds with a client minus that over the others.

    A record of client k lies near the row space of the sums that hold k and of no others. The
    median over the records is taken off each round first, as rounds differ in how much of any
    vector their sums explain.

    Args:
        log_residuals: log r of every round and record.
        took_part: whether the client was in the round's sum, which the server knows.

    Raises:
        ValueError: the numbers of rounds differ, or a client is in all rounds or in none.

    Example:
        >>> residuals = torch.tensor([[-9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> participation_contrasts(residuals, torch.tensor([[True, False], [False, True]]))[0]
        tensor([-9.,  9.], dtype=torch.float64)
    """
    if len(log_residuals) != len(took_part):
        raise ValueError(
            f"log_residuals and took_part must be of the same rounds, got {len(log_residuals)} and "
            f"{len(took_part)}."
        )
    counts = took_part.sum(0)
    for client, count in enumerate(counts.tolist()):
        if not 0 < count < len(took_part):
            raise ValueError(
                f"client {client} must be in some rounds and missing from others, got "
                f"{count} of {len(took_part)} rounds."
            )
    relative = log_residuals.double()
    relative = relative - relative.median(1, keepdim=True).values
    inside = took_part.double()
    with_client = relative.T @ inside / inside.sum(0)
    without = relative.T @ (1 - inside) / (1 - inside).sum(0)
    return with_client - without


def attribute(
    log_residuals: Float[Tensor, "T R"],
    null_log_residuals: Float[Tensor, "T N"],
    took_part: Bool[Tensor, "T K"],
) -> Attribution:
    """Name the client of each record, with the chance that a stranger is named as surely.

    The p-value is the rank of a record's smallest contrast among those of the null records, which
    are nobody's: the search among K clients is thereby counted.

    Args:
        log_residuals: of the records in question, by round.
        null_log_residuals: of records that no client holds.
        took_part: whether the client was in the round's sum.

    Raises:
        ValueError: see :func:`participation_contrasts`.
    """
    together = torch.cat([log_residuals, null_log_residuals], 1)
    contrasts = participation_contrasts(together, took_part)
    count = log_residuals.shape[1]
    smallest = contrasts.min(1)
    p_values = rank_p_values(smallest.values[:count], smallest.values[count:])
    ordered = contrasts[:count].sort(1).values
    spread = contrasts[count:].std()
    nothing = torch.zeros(count, dtype=ordered.dtype)
    margins = (ordered[:, 1] - ordered[:, 0]) / spread if ordered.shape[1] > 1 else nothing
    return Attribution(smallest.indices[:count], contrasts[:count], p_values, margins)
