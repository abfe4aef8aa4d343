import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.correlation import rank_agreement


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=6))
def test_agreement_in_one_round_is_spearman_with_its_exact_permutation_test(pairs):
    found = rank_agreement((1, i, x, y) for i, (x, y) in enumerate(pairs))
    x, y = (list(map(float, column)) for column in zip(*pairs, strict=True))
    assert found.n == len(pairs) and found.least == pytest.approx(2 / math.factorial(len(pairs)))
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found.coefficient is None
        return
    assert found.coefficient == pytest.approx(stats.spearmanr(x, y).statistic)

    def statistic(x):
        return abs(stats.spearmanr(x, y).statistic)

    exact = stats.permutation_test(
        (x,), statistic, permutation_type="pairings", alternative="greater", n_resamples=np.inf
    )
    assert found.p_value == pytest.approx(exact.pvalue)


def test_random_orders_stand_for_all_where_these_are_too_many():
    x, noise = np.random.default_rng(2).standard_normal((2, 40))
    y = 0.5 * x + math.sqrt(0.75) * noise
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
