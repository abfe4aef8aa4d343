"""Compute p-values of statistics from those of null records, and correct them for many candidates.

Null records are known not to be members. Throughout, a small statistic is evidence for membership.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

TAIL_SHARE = 0.05
"""The share of the null records (known not to be members), those with the smallest statistics, from
which the rate α of the exponential tail is estimated; see :func:`tail_p_values`. With a larger
share the estimate varies less, but rests more on statistics outside of the tail."""

SMALLEST_TAIL = 10
"""The least number of null records (known not to be members) in the tail of smallest statistics.
With fewer, no tail is fitted. With this number the lower limit of α, which is used, is about half
of the estimate."""


def rank_p_values(
    candidates: Float[Tensor, " C"], null: Float[Tensor, " N"]
) -> Float[Tensor, " C"]:
    """Return the p-value ``(1 + #{null ≤ t}) / (1 + N)`` of each candidate's statistic t.

    N is the number of null records, which are known not to be members. If a candidate that is no
    member and the null records are exchangeable, such as draws from one distribution, this is a
    p-value for any statistic: P(p ≤ α) ≤ α (Phipson and Smyth 2010; conformal p-values of Vovk et
    al. 2005). It cannot be less than 1 / (1 + N).

    Example:
        >>> null = torch.arange(1.0, 10.0)
        >>> rank_p_values(torch.tensor([0.5, 3.0, 20.0]), null).tolist()
        [0.1, 0.4, 1.0]
    """
    below = torch.searchsorted(
        null.double().sort().values, candidates.double().contiguous(), right=True
    )
    return (1 + below).double() / (1 + len(null))


def tail_p_values(
    candidates: Float[Tensor, " C"], null: Float[Tensor, " N"]
) -> Float[Tensor, " C"]:
    """Return p-values by rank among null records (no members), continued by an exponential tail.

    For a statistic x below all N null statistics, ``p = (k/N) exp(−α (x₍ₖ₎ − x))``. Here x₍ₖ₎ is
    the k-th smallest null statistic, k is 5 % of N, and α is the lower 95 % bound ``α̂ (1 −
    1.645/√k)`` of Hill's estimate ``1/α̂ = mean(x₍ₖ₎ − x₍ᵢ₎, i < k)`` (Hill 1975). For x = log r of
    a residual this assumes that P(r ≤ ε) falls as a power of ε, as it does if the vector at
    distance r from a subspace has a bounded density. If the tail is lighter, p is larger than
    necessary.

    With fewer than 10 (``SMALLEST_TAIL``) null records in the tail, rank p-values are returned.

    Example:
        >>> null = torch.linspace(0, 1, 1000, dtype=torch.float64)
        >>> p = tail_p_values(torch.tensor([-1.0, 0.5], dtype=torch.float64), null)
        >>> bool(p[0] < 1e-12), round(float(p[1]), 2)
        (True, 0.5)
    """
    ranks = rank_p_values(candidates, null)
    ordered = null.double().sort().values
    k = int(TAIL_SHARE * len(null))
    if k < SMALLEST_TAIL:
        return ranks
    spread = float((ordered[k - 1] - ordered[: k - 1]).mean())
    if not spread > 0:
        return ranks
    rate = (1 - 1.645 / math.sqrt(k)) / spread
    beyond = k / len(null) * torch.exp(-rate * (ordered[k - 1] - candidates.double()))
    return torch.where(candidates.double() < ordered[0], torch.minimum(beyond, ranks), ranks)


def holm(p_values: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """Return p-values p̃ (C,) that are valid for all C candidates at once (Holm 1979). In ascending
    order they are ``p̃₍ᵢ₎ = max_{j ≤ i} min(1, (C − j + 1) p₍ⱼ₎)``, with p₍ⱼ₎ the j-th smallest of
    ``p_values``. With probability ≥ 1 − α no candidate with p̃ ≤ α is a non-member, however the
    p-values depend on each other.

    Example:
        >>> [round(p, 3) for p in holm(torch.tensor([0.01, 0.04, 0.03])).tolist()]
        [0.03, 0.06, 0.06]
    """
    count = len(p_values)
    ordered, order = p_values.double().sort()
    factors = torch.arange(count, 0, -1, dtype=torch.float64)
    corrected = torch.empty_like(ordered)
    corrected[order] = (factors * ordered).clamp_max(1).cummax(0).values if count else ordered
    return corrected


def benjamini_hochberg(p_values: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """Return p-values (C,) corrected to limit the expected share of false alarms among alarms to α.

    A candidate is called a member if its corrected p-value is at most α. In ascending order the
    corrected ones are ``p̃₍ᵢ₎ = min_{j ≥ i} min(1, C p₍ⱼ₎ / j)`` (Benjamini and Hochberg 1995). The
    p-values must be independent or positively dependent, as those from the same null records (known
    not to be members) are (Bates et al. 2023).

    Example:
        >>> [round(p, 3) for p in benjamini_hochberg(torch.tensor([0.01, 0.04, 0.03])).tolist()]
        [0.03, 0.04, 0.04]
    """
    count = len(p_values)
    if not count:
        return p_values.double()
    ordered, order = p_values.double().sort(descending=True)
    factors = count / torch.arange(count, 0, -1, dtype=torch.float64)
    corrected = torch.empty_like(ordered)
    corrected[order] = (factors * ordered).clamp_max(1).cummin(0).values
    return corrected
