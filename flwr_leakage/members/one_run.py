"""Compute a lower bound of ε from canaries, a random half of which took part in a training run."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares r / m of the m canaries for which a guess is made. A small share gives the best bound if
few canaries leak much, a large one if all leak."""


def one_run_epsilon(
    statistics: Float[Tensor, " m"],
    is_member: Bool[Tensor, " m"],
    delta: float = 1e-5,
    confidence: float = 0.95,
    shares: Sequence[float] = SHARES,
) -> float:
    """Return a lower bound, with the given confidence, of the ε of an (ε, δ)-private mechanism.

    An independent fair coin decides for each of m canaries, which are known records, whether it was
    in the run. For the r canaries with the most extreme statistics a guess is made: those with the
    smallest were in, those with the largest were not. Let v guesses be right. If the mechanism is
    (ε, δ)-differentially private for add-or-remove, then

        P(at least v right) ≤ P(W ≥ v) + 2 m δ max_{1 ≤ i ≤ v} P(v > W ≥ v − i) / i,

    with W binomial of r trials and probability 1 / (1 + e^−ε) (Steinke, Nasr and Jagielski 2023,
    theorem 5.2). The bound is the smallest ε that this inequality does not refute. As r may not be
    chosen by how many guesses are right, several r are tried, among which the significance level 1
    − confidence is divided (Bonferroni).

    If all guesses are right, the bound is about ln(r / 4.8) with the default arguments: m canaries
    cannot show more than ln(m / 4.8).

    Args:
        statistics: (m,) a statistic of each canary, small for members, such as
            ``Membership.p_values``.
        is_member: (m,) booleans, true for canaries in the run. The coins have to be fair and
            independent.
        delta: δ in [0, 1).
        confidence: the confidence of the bound, in (0, 1).
        shares: the ratios r / m to try, each in (0, 1].

    Raises:
        ValueError: the arguments differ in length, or there are fewer than 2 canaries.

    Example:
        >>> order = torch.arange(1000)
        >>> round(one_run_epsilon(order.double(), order < 500), 1)
        5.0
    """
    count = len(statistics)
    if count < 2 or len(is_member) != count:
        raise ValueError(
            f"statistics and is_member must be of the same canaries, at least 2, got {count} and "
            f"{len(is_member)}."
        )
    if not (0 <= delta < 1 and 0 < confidence < 1 and all(0 < share <= 1 for share in shares)):
        raise ValueError(
            f"delta must lie in [0, 1), confidence in (0, 1) and shares in (0, 1], got {delta}, "
            f"{confidence} and {tuple(shares)}."
        )
    # Canaries with equal statistics are ordered at random, so that their given order does not
    # matter.
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    order = shuffled[statistics[shuffled].argsort(stable=True)]
    found = 0.0
    for share in shares:
        each = max(1, int(share * count / 2))
        right = int(is_member[order[:each]].sum()) + int((~is_member[order[-each:]]).sum())
        level = (1 - confidence) / len(shares)
        found = max(found, _refuted(count, 2 * each, right, delta, level))
    return found


def _refuted(count: int, guesses: int, right: int, delta: float, level: float) -> float:
    """Return the largest ε for which (ε, ``delta``)-differential privacy is refuted, at the
    significance ``level``, if ``right`` of ``guesses`` guesses are right; 0 if no ε is refuted.
    ``count`` is the number of canaries: known records, each a member with probability 1/2.
    """
    low, high = 0.0, 1.0
    if _chance(count, guesses, right, 0.0, delta) > level:
        return 0.0
    while _chance(count, guesses, right, high, delta) <= level:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        refutes = _chance(count, guesses, right, middle, delta) <= level
        low, high = (middle, high) if refutes else (low, middle)
    return low


def _chance(count: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound, under (ε, δ)-differential privacy, of the probability that at least
    ``right`` of ``guesses`` guesses are right. ``count`` is the number of canaries: known records,
    each a member with probability 1/2.
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    near = torch.from_numpy(law.pmf(range(right - 1, -1, -1))).cumsum(0)
    spread = float((near / torch.arange(1, right + 1)).max()) if right else 0.0
    return float(law.sf(right - 1)) + 2 * count * delta * spread
