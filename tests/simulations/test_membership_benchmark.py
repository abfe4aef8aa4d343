"""The benchmark of membership, on the digits that are part of an installed package."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from simulations.benchmarks import membership
from simulations.benchmarks.membership_setup import Case, Sources


def test_a_row_of_the_table():
    case = Case("mlp", 4)
    cells = membership.measure(case, Sources(Path("none")), range(2), alone=False)
    network, update, evidence, members, auc, _, found, flags, *_ = cells
    assert (network, update, evidence, members) == ("mlp", "4 samples", "exact 2", 8)
    assert auc.value == 1 and str(found) == "1.000 [0.631, 1.000]" and flags == "8 / 0"
    *_, below, seconds = cells
    assert below == "none" and float(seconds) > 0


def test_shares_at_a_rate_are_of_the_pooled_others():
    pool = membership.Pool()
    pool.add(torch.cat([torch.tensor([0.0, 0.015, 0.5]), torch.arange(1, 101) / 100]), 3)
    # One of a hundred others may lie below the threshold, which is then the second smallest.
    found = pool.found(0.01)
    assert found is not None and found.value == pytest.approx(2 / 3)
    assert pool.found(0.001) is None and pool.called() == "1.00%"


def test_the_interval_of_the_auc_is_that_of_repeated_draws():
    draws = torch.randn(400, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws[:, :20] -= 1
    found = []
    for row in draws:
        pool = membership.Pool()
        pool.add(row, 20)
        found.append(pool.auc())
    truth = stats.norm.cdf(2**-0.5)
    covered = [each.low <= truth <= each.high for each in found]
    assert 0.9 <= sum(covered) / len(covered) <= 0.98


def test_fedmia_is_a_z_score_against_the_other_clients():
    cosines = torch.tensor([[0.9], [0.1], [0.2], [0.3]], dtype=torch.float64)
    statistic, p_value = membership.against_others(cosines, 0)
    assert float(statistic) == pytest.approx(-7.0)
    assert float(p_value) == pytest.approx(stats.norm.sf(7.0), rel=1e-6)
    with pytest.raises(ValueError, match="at least 3 clients, got 2"):
        membership.against_others(cosines[:2], 0)
