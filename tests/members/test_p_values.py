import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.members.p_values import (
    benjamini_hochberg,
    holm,
    rank_p_values,
    tail_p_values,
)


def test_rank_p_values_are_uniform_under_the_null():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 200, generator=generator)
    p_values = [float(rank_p_values(row[:1], row[1:])) for row in draws]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("law", ["power", "gaussian"])
def test_the_tail_does_not_understate_p_beyond_the_null(law):
    """The mean of p below the null is at least its true size, for both laws of a log-residual."""
    generator = torch.Generator().manual_seed(1)
    at = {"power": -9.0, "gaussian": -4.5}[law]  # true chances 1.2e-4 and 3.4e-6
    true = np.exp(at) if law == "power" else stats.norm.cdf(at)
    found = []
    for _ in range(200):
        draws = torch.rand(2000, generator=generator, dtype=torch.float64)
        null = draws.log() if law == "power" else torch.special.ndtri(draws)
        found.append(float(tail_p_values(torch.tensor([at], dtype=torch.float64), null)))
    assert np.median(found) >= true


def test_without_a_tail_ranks_are_the_answer():
    null = torch.linspace(0, 1, 100)
    candidates = torch.tensor([-5.0, 0.5])
    torch.testing.assert_close(tail_p_values(candidates, null), rank_p_values(candidates, null))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_corrections_agree_with_scipy_and_keep_the_order(values):
    p = torch.tensor(values, dtype=torch.float64)
    adjusted = benjamini_hochberg(p)
    np.testing.assert_allclose(adjusted.numpy(), stats.false_discovery_control(values), atol=1e-12)
    corrected = holm(p)
    assert bool((corrected >= p).all()) and bool((corrected >= adjusted - 1e-12).all())
    assert bool((corrected[p.argsort()].diff() >= 0).all())
