"""The benchmark of membership, on the digits that are part of an installed package."""

from pathlib import Path

import torch

from simulations.benchmarks import membership


def test_a_row_of_the_table():
    case = membership.Case("mlp", 4)
    cells = membership.measure(case, membership.Sources(Path("none")), 2)
    network, update, evidence, members, auc, _, found, flags, *_ = cells
    assert (network, update, evidence, members) == ("mlp", "4 samples", "exact 2", 8)
    assert auc == "1.000" and found.startswith("1.000 [0.631, 1.000]") and flags == "8 / 0"


def test_shares_at_a_rate_are_of_the_pooled_others():
    pool = membership.Pool()
    pool.add(torch.cat([torch.tensor([0.0, 0.015, 0.5]), torch.arange(1, 101) / 100]), 3)
    # One of a hundred others may lie below the threshold, which is then the second smallest.
    assert pool.found(0.01).startswith("0.667 [")
    assert pool.found(0.001) == "–" and pool.called() == "1.00%"
