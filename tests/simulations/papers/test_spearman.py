import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.papers.spearman import spearman


def correlated(n, rho, seed):
    x, noise = np.random.default_rng(seed).standard_normal((2, n))
    return x.tolist(), (rho * x + math.sqrt(1 - rho**2) * noise).tolist()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=4, max_size=15))
def test_spearman_is_pearson_of_mean_ranks(pairs):
    x, y = (list(map(float, column)) for column in zip(*pairs, strict=True))
    result = spearman(x, y)

    def ranks(values):
        return [
            sum(other < value for other in values) + (values.count(value) + 1) / 2
            for value in values
        ]

    if len(set(x)) == 1 or len(set(y)) == 1:
        assert result.coefficient is None and "constant" in result.note
        return
    rank_x, rank_y = np.array(ranks(x)), np.array(ranks(y))
    expected = np.corrcoef(rank_x, rank_y)[0, 1]
    assert result.coefficient == pytest.approx(expected, abs=1e-12)
    assert result.n == len(pairs)


def test_intervals_cover_at_their_level():
    """Over many samples of a bivariate normal, 95 % intervals hold the true value."""
    rho, hits = 0.5, 0
    truth = 6 / math.pi * math.asin(rho / 2)
    for seed in range(400):
        result = spearman(*correlated(25, rho, seed))
        hits += result.low <= truth <= result.high
    assert 0.92 < hits / 400 < 0.98


def test_the_interval_of_ranks_takes_five_pairs():
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 3.0, 2.0, 5.0, 4.0]
    four, five = spearman(x[:4], y[:4]), spearman(x, y)
    assert four.low is None and four.note == "no interval: needs 5 pairs"
    # artanh ρ ± 1.96 √((1 + ρ²/2) / 2) with ρ = 0.8.
    half = 1.959964 * math.sqrt(1.32 / 2)
    expected = math.tanh(math.atanh(0.8) - half), math.tanh(math.atanh(0.8) + half)
    assert (five.low, five.high) == pytest.approx(expected)


def test_missing_values_are_left_out_in_pairs():
    x = [1.0, None, 3.0, 4.0, math.nan, 6.0, 7.0]
    y = [2.0, 5.0, math.inf, 4.0, 1.0, 9.0, 7.0]
    result = spearman(x, y)
    assert result.n == 4
    assert result.coefficient == pytest.approx(spearman([1, 4, 6, 7], [2, 4, 9, 7]).coefficient)


def test_what_is_undefined_is_no_number():
    few = spearman([1.0, 2.0], [1.0, 2.0])
    assert few.coefficient is None and few.note == "needs 3 pairs, got 2"
    three = spearman([1.0, 2.0, 3.0], [1.0, 3.0, 2.0])
    assert three.coefficient == pytest.approx(0.5) and three.low is None
    perfect = spearman([float(i) for i in range(10)], [float(i) for i in range(10)])
    assert perfect.coefficient == pytest.approx(1.0)
    assert perfect.low is None and perfect.note == "no interval: a perfect correlation"
    assert spearman([], []).n == 0
    with pytest.raises(ValueError, match="same length, got 1 and 2"):
        spearman([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"confidence must lie in \(0, 1\), got 95"):
        spearman([1.0], [1.0], 95.0)
