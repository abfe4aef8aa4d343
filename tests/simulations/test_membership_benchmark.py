"""The benchmark of membership, on the digits that are part of an installed package."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from simulations.benchmarks import membership
from simulations.benchmarks.membership_setup import Case, Sources


def test_a_row_of_the_table():
    case = Case("mlp", 4)
    cells = membership.measure(case, Sources(Path("none")), 2)
    network, update, evidence, members, auc, _, found, flags, *_ = cells
    assert (network, update, evidence, members) == ("mlp", "4 samples", "exact 2", 8)
    assert auc == "1.000" and found.startswith("1.000 [0.631, 1.000]") and flags == "8 / 0"


def test_shares_at_a_rate_are_of_the_pooled_others():
    pool = membership.Pool()
    pool.add(torch.cat([torch.tensor([0.0, 0.015, 0.5]), torch.arange(1, 101) / 100]), 3)
    # One of a hundred others may lie below the threshold, which is then the second smallest.
    assert pool.found(0.01).startswith("0.667 [")
    assert pool.found(0.001) == "–" and pool.called() == "1.00%"


def test_fedmia_is_a_z_score_against_the_other_clients():
    cosines = torch.tensor([[0.9], [0.1], [0.2], [0.3]], dtype=torch.float64)
    statistic, p_value = membership.against_others(cosines, 0)
    assert float(statistic) == pytest.approx(-7.0)
    assert float(p_value) == pytest.approx(stats.norm.sf(7.0), rel=1e-6)
    with pytest.raises(ValueError, match="at least 3 clients, got 2"):
        membership.against_others(cosines[:2], 0)
