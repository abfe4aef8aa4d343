import numpy as np
import pytest
from scipy import stats

from simulations.papers import Judgement
from simulations.papers.i2f.evidence import (
    Interval,
    bootstrap,
    judged,
    median_ratio,
    share,
    slope,
    spearman,
    table_of,
)


def test_bootstrap_of_a_mean_has_the_width_of_the_central_limit_theorem():
    values = np.random.default_rng(0).normal(3, 2, 200)
    found = bootstrap({"image": np.arange(200), "x": values}, lambda t: t["x"].mean())
    half = 1.96 * values.std() / 200**0.5
    assert found.value == pytest.approx(values.mean()) and found.n == 200
    assert found.high - found.low == pytest.approx(2 * half, rel=0.2)


def test_rows_of_one_image_are_drawn_together():
    # Ten rows of each of twenty images say no more than one row of each.
    values = np.random.default_rng(1).normal(size=20)
    once = bootstrap({"image": np.arange(20), "x": values}, lambda t: t["x"].mean())
    often = {"image": np.repeat(np.arange(20), 10), "x": np.repeat(values, 10)}
    found = bootstrap(often, lambda t: t["x"].mean())
    assert (found.low, found.high) == pytest.approx((once.low, once.high))
    assert found.n == once.n == 20


def test_a_share_of_all_or_none_has_an_interval_with_a_width():
    table = {"image": np.repeat(np.arange(10), 3), "x": np.ones(30)}
    found = share(table, lambda t: t["x"] > 0)
    assert (found.value, found.high, found.n) == (1, 1, 10)
    assert found.low == pytest.approx(0.025 ** (1 / 10))  # P(all of ten | share) = 0.025
    assert judged("text", "all", found, least=0.95).judgement is Judgement.UNDECIDED
    none = share(table, lambda t: t["x"] < 0)
    assert (none.value, none.low) == (0, 0) and none.high == pytest.approx(1 - found.low)
    mixed = share({**table, "x": np.repeat(np.arange(10) < 5, 3)}, lambda t: t["x"])
    assert 0 < mixed.low < 0.5 < mixed.high < 1


def test_statistics_of_known_columns():
    x = np.array([1.0, 2.0, 4.0, 8.0])
    table = {"x": x, "y": 3 * x**2}
    assert slope(table, "x", "y") == pytest.approx(2)
    assert median_ratio(table, "y", "x") == pytest.approx(9)
    noisy = {"x": x, "y": np.array([1.0, 3.0, 2.0, 4.0])}
    assert spearman(noisy, "x", "y") == pytest.approx(stats.spearmanr(x, noisy["y"]).statistic)
    assert np.isnan(spearman({"x": x, "y": np.ones(4)}, "x", "y"))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 1.8, Judgement.HOLDS),
        (0.9, 1.8, Judgement.UNDECIDED),
        (1.8, 2.4, Judgement.UNDECIDED),
        (0.1, 0.8, Judgement.DOES_NOT_HOLD),
        (2.1, 2.8, Judgement.DOES_NOT_HOLD),
        (np.nan, np.nan, Judgement.NOT_COMPARABLE),
    ],
)
def test_a_claim_is_judged_by_where_its_interval_lies(low, high, verdict):
    found = judged("text", "1.5", Interval((low + high) / 2, low, high, 10), 1.0, 2.0)
    assert found.judgement is verdict and found.n == 10


def test_a_table_holds_the_rows_that_are_wanted():
    rows = [{"panel": "a", "x": 1.0}, {"panel": "b", "x": 2.0}, {"panel": "a", "x": None}]
    np.testing.assert_equal(table_of(rows, panel="a")["x"], [1.0, np.nan])
