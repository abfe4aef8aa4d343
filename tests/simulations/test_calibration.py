import math

import numpy as np
import pytest

from simulations.benchmarks.calibration import fit_calibration


def test_a_power_law_is_recovered_exactly():
    scores = [0.01 * 2**k for k in range(8)]
    fit = fit_calibration("i2f", scores, [3 * s**0.5 for s in scores], conditions="LeNet, L-BFGS")
    assert fit.slope == pytest.approx(0.5) and fit.error == pytest.approx(0, abs=1e-12)
    assert fit.intercept == pytest.approx(math.log10(3))
    assert fit.rank_correlation == pytest.approx(1) and fit.baseline_error > 0.1


def test_the_error_is_that_of_leaving_each_pair_out():
    generator = np.random.default_rng(0)
    x = generator.uniform(-2, 1, 12)
    psnr = 20 - 15 * x + generator.normal(size=12)
    scores = list(10**x)
    fit = fit_calibration("i2f", scores, list(psnr), "psnr")
    left_out = []
    for i in range(12):
        keep = np.arange(12) != i
        slope, intercept = np.polyfit(x[keep], psnr[keep], 1)
        left_out.append(psnr[i] - intercept - slope * x[i])
    assert fit.error == pytest.approx(np.sqrt(np.mean(np.square(left_out))))
    alone = [psnr[i] - np.delete(psnr, i).mean() for i in range(12)]
    assert fit.baseline_error == pytest.approx(np.sqrt(np.mean(np.square(alone))))


def test_gaps_are_left_out():
    values = [1.0, 2.0, None, 3.0, 4.0, 5.0, 0.0, 6.0]
    outcomes = [1.0, 2.0, 3.0, None, 4.0, 5.0, 1.0, 6.0]
    fit = fit_calibration("i2f", values, outcomes)
    assert fit.num_pairs == 5


def test_too_little_to_fit_is_an_error():
    with pytest.raises(ValueError, match="at least 5 pairs"):
        fit_calibration("i2f", [1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="equal"):
        fit_calibration("i2f", [1.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert not math.isnan(fit_calibration("a", [1.0, 2, 3, 4, 5], [2.0] * 5).rank_correlation)
