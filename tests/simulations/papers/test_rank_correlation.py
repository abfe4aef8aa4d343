"""Mean rank correlations, their intervals, and what they say of a claim."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from flwr_leakage._conf import conf_dir
from simulations.papers import Judgement
from simulations.papers.lavp_printed import OUTCOMES, TABLES, printed
from simulations.papers.rank_correlation import judge_positive, rank_correlations


def tables(count, seed=0):
    generator = np.random.default_rng(seed)
    truth = generator.normal(size=(count, 1))
    return [np.hstack([truth, truth + generator.normal(size=(count, 1))]) for _ in range(2)]


def test_it_is_scipys_rho_averaged_over_tables():
    data = tables(30)
    found = rank_correlations(("left", "right"), data, 100, 0)
    expected = np.mean([spearmanr(*table.T).statistic for table in data])
    assert found.rho("left", "right") == pytest.approx(expected)
    low, high = found.interval("left", "right")
    assert low < expected < high and found.units == 30
    assert found.more("left", "right", "right")[0] == pytest.approx(expected - 1)


def test_rows_of_one_cluster_are_one_unit():
    [table, _] = tables(12)
    columns = ("left", "right")
    plain = rank_correlations(columns, [table], 300, 0)
    # Ten copies of a row tell nothing new: the interval stays, and n is that of the units.
    copied = np.repeat(table, 10, axis=0)
    units = np.repeat(np.arange(12), 10).tolist()
    found = rank_correlations(columns, [copied], 300, 0, units)
    assert found.units == plain.units == 12
    assert found.interval(*columns) == pytest.approx(plain.interval(*columns), abs=0.02)
    alone = rank_correlations(columns, [copied], 300, 0)
    assert np.ptp(alone.interval(*columns)) < np.ptp(plain.interval(*columns)) / 2


def test_a_constant_column_and_missing_entries_do_not_count():
    whole, other = tables(30)
    other[:, 1] = 0.0
    whole[3, 0] = np.nan
    found = rank_correlations(("left", "right"), [whole, other], 20, 0)
    kept = np.delete(whole, 3, axis=0)
    assert found.rho("left", "right") == pytest.approx(spearmanr(*kept.T).statistic)
    assert found.units == 30
    both = rank_correlations(("left", "right"), [other], 20, 0)
    claim = judge_positive("x", "y", both.rho("left", "right"), *both.interval("left", "right"), 30)
    assert claim.judgement is Judgement.NOT_COMPARABLE and claim.ours is None


@pytest.mark.parametrize(
    ("ours", "low", "high", "expected"),
    [
        (0.4, 0.1, 0.6, Judgement.HOLDS),
        (0.4, -0.1, 0.6, Judgement.UNDECIDED),
        (-0.2, -0.6, 0.1, Judgement.UNDECIDED),
        (-0.4, -0.6, -0.1, Judgement.DOES_NOT_HOLD),
    ],
)
def test_the_interval_decides(ours, low, high, expected):
    claim = judge_positive("It grows (Table 1).", "0.5", ours, low, high, 50)
    assert claim.judgement is expected


def test_printed_cells_have_the_signs_that_ranks_demand():
    for row, losses in TABLES.items():
        for loss, proxies in losses.items():
            for proxy in proxies:
                mse, _, psnr, _ = (printed(row, loss, proxy, name) for name in OUTCOMES)
                # Ranks of MSE and PSNR are opposite; ImageNet's means over networks are rounded.
                assert mse == pytest.approx(-psnr, abs=0.1 if row == "ImageNet" else 1e-9)
    assert printed("ImageNet", "L2", "fusion", "mse") is None


def test_no_attack_preset_starts_from_the_truth():
    texts = [path.read_text() for path in (conf_dir() / "attack").glob("*.yaml")]
    assert texts and not any("papers" in text or "local_convergence" in text for text in texts)
