"""How many members a membership test finds at a rate of false alarms, where a run knows them."""

from dataclasses import dataclass

from scipy import stats

from flwr_leakage.report.index import Index


@dataclass(frozen=True)
class Share:
    """``found`` of ``total``, each of which was found with one chance, on its own."""

    found: int
    total: int

    def __add__(self, other: "Share") -> "Share":
        return Share(self.found + other.found, self.total + other.total)

    def told(self, style: str = ".0%") -> str:
        """Return the share and its interval of 95 % (Clopper and Pearson 1934), as text.

        Example:
            >>> Share(8, 10).told()
            '80% (44% to 97%, n = 10)'
        """
        low, high = stats.binomtest(self.found, self.total).proportion_ci(method="exact")
        share = f"{self.found / self.total:{style}}"
        return f"{share} ({low:{style}} to {high:{style}}, n = {self.total})"


def members_found(index: Index, rate: float) -> Share | None:
    """Return how many tested members have a smaller p-value than all but a share of the others.

    Members are pairs of an update and a record in it. Where a test says nothing, p is 1.

    Args:
        index: of a run whose truth is known.
        rate: of false alarms, in (0, 1).

    Returns:
        The share; ``None`` where there is no member, or fewer others than 1 / ``rate``.
    """
    truth = index.series("membership", "membership_truth")
    p_values = index.series("membership", "membership_p_value")
    members: list[float] = []
    others: list[float] = []
    for key, record in truth.items():
        tested = p_values.get(key)
        p = 1.0 if tested is None or tested.value is None else tested.value
        (members if record.value else others).append(p)
    allowed = int(rate * len(others))
    if not members or not allowed:
        return None
    limit = sorted(others)[allowed]
    return Share(sum(p < limit for p in members), len(members))
