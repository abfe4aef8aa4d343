"""Attribute records to clients, from the sum of updates in each round and the list of its
clients.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.members.p_values import rank_p_values


@dataclass(frozen=True)
class Attribution:
    """The client to which each of R records is attributed.

    Attributes:
        clients: (R,) the index of the client with the smallest contrast.
        contrasts: (R, K) for each record and each of K clients, the mean of the record's statistic
            in rounds with the client less its mean in rounds without the client, in standard
            deviations among records of no client. The contrast with the record's own client is
            negative. See :func:`participation_contrasts`.
        p_values: (R,) the probability that the smallest of the K contrasts is as small for a record
            that belongs to no client.
        margins: (R,) the difference between the second smallest contrast and the smallest; 0 if the
            two clients took part in the same rounds.
    """

    clients: Int[Tensor, " R"]
    contrasts: Float[Tensor, "R K"]
    p_values: Float[Tensor, " R"]
    margins: Float[Tensor, " R"]


def participation_contrasts(
    statistics: Float[Tensor, "T R"], took_part: Bool[Tensor, "T K"]
) -> Float[Tensor, "R K"]:
    """Return the contrast of R records and K clients, negative for a record's own client.

    The contrast of a record and a client is ``(mean over the n rounds with the client − mean over
    the m rounds without) / √(1/n + 1/m)``. If a record's statistics are Gaussian with one mean in
    its client's rounds and another in the others, the client with the smallest contrast is the
    likeliest one.

    ``statistics`` (T, R) are those of R records in T rounds: small for members, and in units of
    their standard deviation in the round. ``took_part`` (T, K) is true if the client is in the
    round's sum.

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
    """Return the likeliest client of each record, with the p-value of this attribution.

    Each round's statistics are divided by their standard deviation among null records, which no
    client holds. The p-value is the relative rank of a record's smallest contrast among those of
    null records, so that it accounts for the choice among K clients.

    Args:
        statistics: (T, R) the statistic of each record in each round, small for members:
            ``-Membership.fits`` of a layer if labels are known, else the logarithm of
            ``Membership.residuals``.
        of_null: (T, N) the same statistic of N records that no client holds.
        took_part: (T, K) booleans, true if the client is in the round's sum.

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
