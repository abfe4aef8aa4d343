import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.correlation import rank_agreement, spearman


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


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=6))
def test_agreement_in_one_round_is_spearman_with_its_exact_permutation_test(pairs):
    found = rank_agreement((1, i, x, y) for i, (x, y) in enumerate(pairs))
    x, y = (list(map(float, column)) for column in zip(*pairs, strict=True))
    assert found.coefficient == pytest.approx(spearman(x, y).coefficient)
    assert found.n == len(pairs) and found.least == pytest.approx(2 / math.factorial(len(pairs)))
    if found.coefficient is None:
        return

    def statistic(x):
        return abs(stats.spearmanr(x, y).statistic)

    exact = stats.permutation_test(
        (x,), statistic, permutation_type="pairings", alternative="greater", n_resamples=np.inf
    )
    assert found.p_value == pytest.approx(exact.pvalue)


def test_random_orders_stand_for_all_where_these_are_too_many():
    x, y = correlated(40, 0.5, seed=2)
    found = rank_agreement((1, i, a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)))
    assert found.p_value == pytest.approx(stats.spearmanr(x, y).pvalue, abs=0.002)
    again = rank_agreement((1, i, a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)))
    assert again == found


def test_only_units_of_the_same_rounds_are_compared_and_each_counts_once():
    def seen(unit, rounds, x, y):
        return [(when, unit, x + 10 * when, y + 10 * when) for when in rounds]

    both = [seen(i, (1, 2), float(i), float(-i)) for i in range(3)]
    late = [seen(10 + i, (3,), float(i), float(-i)) for i in range(2)]
    more = [seen(20, (1,), 3.0, -3.0), seen(30, (4,), 9.0, 9.0)]
    found = rank_agreement([row for rows in both + late + more for row in rows])
    assert found.n == 6 and found.coefficient == pytest.approx(-1.0)
    # 4! · 2! exchanges, of which two lead as far from zero.
    assert found.p_value == found.least == pytest.approx(2 / 48)
    assert rank_agreement(more[1]).coefficient is None


def test_chance_is_called_an_agreement_no_more_often_than_the_level():
    """Units keep their numbers over three rounds: as many pairs by themselves would be sure."""
    draws, hits = np.random.default_rng(3), 0
    for _ in range(300):
        x, y = draws.standard_normal((2, 6))
        rows = [(r, i, x[i] + r, y[i] - r) for r in range(3) for i in range(6)]
        p_value = rank_agreement(rows).p_value
        hits += p_value is not None and p_value <= 0.05
    assert hits <= 300 * 0.05 + 2 * math.sqrt(300 * 0.05 * 0.95)


def test_a_test_of_very_many_units_ends_soon_and_claims_little():
    draws = np.random.default_rng(0)
    found = rank_agreement((1, i, x, x) for i, x in enumerate(draws.random(100_000)))
    assert found.coefficient == pytest.approx(1.0) and found.p_value == pytest.approx(1 / 101)
