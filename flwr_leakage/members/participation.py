"""Attribute records to clients by sums of updates, and by who took part in which round."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.members.p_values import rank_p_values


@dataclass(frozen=True)
class Attribution:
    """The client to which each of R records is attributed.

    Attributes:
        clients: (R,) index of the client with the smallest contrast.
        contrasts: (R, K) contrast of each record and client, in standard deviations of a null
            record's contrast; see :func:`participation_contrasts`.
        p_values: (R,) chance that a record of nobody has so small a smallest contrast of K.
        margins: (R,) distance of the smallest contrast from the next one, in the same units; 0 if
            two clients were in the same rounds, which makes them equal.
    """

    clients: Int[Tensor, " R"]
    contrasts: Float[Tensor, "R K"]
    p_values: Float[Tensor, " R"]
    margins: Float[Tensor, " R"]


def participation_contrasts(
    statistics: Float[Tensor, "T R"], took_part: Bool[Tensor, "T K"]
) -> Float[Tensor, "R K"]:
    """Return how much smaller each record's statistic is in the rounds with a client.

    The contrast is ``(mean over the n rounds with − mean over the m rounds without) / √(1/n +
    1/m)``. A record of client k fits into the sums that contain k, and into no others. If a
    record's statistics are Gaussian with one mean in its client's rounds and another in the others,
    the client with the smallest contrast is the likeliest one. Without the divisor, clients that
    were in few rounds would be named too often.

    Args:
        statistics: (T, R) a statistic of every round and record, small for members, in units of its
            spread, such as log r less the round's median, over its standard deviation.
        took_part: (T, K) booleans, true for clients in the round's sum, which the server knows.

    Raises:
        ValueError: the numbers of rounds differ, or a client is in all rounds or in none.

    Example:
        >>> statistics = torch.tensor([[-9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> took_part = torch.tensor([[True, False], [False, True]])
        >>> participation_contrasts(statistics, took_part)[0].round(decimals=3).tolist()
        [-6.364, 6.364]
    """
    if len(statistics) != len(took_part):
        raise ValueError(
            f"statistics and took_part must be of the same rounds, got {len(statistics)} and "
            f"{len(took_part)}."
        )
    counts = took_part.sum(0)
    for client, count in enumerate(counts.tolist()):
        if not 0 < count < len(took_part):
            raise ValueError(
                f"client {client} must be in some rounds and missing from others, got "
                f"{count} of {len(took_part)} rounds."
            )
    inside = took_part.double()
    with_client = statistics.double().T @ inside / inside.sum(0)
    without = statistics.double().T @ (1 - inside) / (1 - inside).sum(0)
    rounds = 1 / inside.sum(0) + 1 / (1 - inside).sum(0)
    return (with_client - without) / rounds.sqrt()


def attribute(
    statistics: Float[Tensor, "T R"],
    of_null: Float[Tensor, "T N"],
    took_part: Bool[Tensor, "T K"],
) -> Attribution:
    """Return the client of each record, and the chance that a stranger is named as surely.

    Each round's statistics are taken in units of the null records' spread, as rounds differ in how
    much of any vector their sums explain.

    The p-value is the rank of a record's smallest contrast among those of null records, which
    belong to no client. So it accounts for the search among K clients.

    Args:
        statistics: (T, R) statistics of the records in question by round, small for members:
            ``-Membership.fits`` of a layer if labels are known, or else the logarithm of
            ``Membership.residuals``.
        of_null: (T, N) the same statistics of records that no client holds.
        took_part: (T, K) booleans, true for clients in the round's sum.

    Raises:
        ValueError: the contrasts cannot be computed; see :func:`participation_contrasts`.
    """
    null = of_null.double()
    together = torch.cat([statistics.double(), null], 1) - null.median(1, keepdim=True).values
    together = together / null.std(1, keepdim=True).clamp_min(1e-12)
    contrasts = participation_contrasts(together, took_part)
    count = statistics.shape[1]
    smallest = contrasts.min(1)
    p_values = rank_p_values(smallest.values[:count], smallest.values[count:])
    spread = contrasts[count:].std()
    ordered = contrasts[:count].sort(1).values
    nothing = torch.zeros(count, dtype=ordered.dtype)
    margins = (ordered[:, 1] - ordered[:, 0]) / spread if ordered.shape[1] > 1 else nothing
    return Attribution(smallest.indices[:count], contrasts[:count], p_values, margins)
