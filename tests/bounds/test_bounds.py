"""The formulas against closed forms, integrals and simulations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.bounds import (
    bayesian_mse,
    cramer_rao_mse,
    fisher_leakage,
    image_psnr,
    posterior_variance,
    psnr_chance,
)


def test_least_squares_reaches_the_cramer_rao_bound():
    draw = torch.Generator().manual_seed(0)
    J = torch.randn(6, 20, generator=draw, dtype=torch.float64)
    noise = 0.3 * torch.randn(20, 4000, generator=draw, dtype=torch.float64)
    reached = (torch.linalg.pinv(J.T) @ noise).square().mean()
    bound = cramer_rao_mse(torch.linalg.svdvals(J) ** 2, torch.tensor(0.3).double())
    assert float(reached / bound) == pytest.approx(1, rel=0.05)


def test_the_posterior_mean_reaches_the_bayesian_bound():
    draw = torch.Generator().manual_seed(1)
    J = torch.randn(6, 5, generator=draw, dtype=torch.float64)  # of rank 5 of 6
    x = 0.7 * torch.randn(6, 20_000, generator=draw, dtype=torch.float64)
    seen = J.T @ x + 0.5 * torch.randn(5, 20_000, generator=draw, dtype=torch.float64)
    precision = J @ J.T / 0.25 + torch.eye(6) / 0.49
    reached = (torch.linalg.solve(precision, J @ seen / 0.25) - x).square().mean()
    eigenvalues = torch.linalg.eigvalsh(J @ J.T).clamp_min(0)
    bound = bayesian_mse(eigenvalues, torch.tensor(0.5).double(), 0.7)
    assert float(reached / bound) == pytest.approx(1, rel=0.03)


positive = st.floats(1e-3, 1e3)


@settings(deadline=None)
@given(st.lists(positive, min_size=1, max_size=8), positive, positive)
def test_the_bounds_are_in_order(eigenvalues, noise_std, prior_std):
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    sigma = torch.tensor(noise_std, dtype=torch.float64)
    unbiased = float(cramer_rao_mse(values, sigma))
    assert float(bayesian_mse(values, sigma, prior_std)) <= min(unbiased, prior_std**2) * (1 + 1e-9)
    leakage = float(fisher_leakage(values.sum(), sigma, len(values)))
    assert 1 / leakage**2 <= unbiased * (1 + 1e-9)
    wide = bayesian_mse(values, sigma, 1e9)
    assert float(wide) == pytest.approx(unbiased, rel=1e-3)


def test_without_noise_nothing_is_left_and_without_information_all():
    assert float(posterior_variance(torch.tensor(2.0), 0.0, 3.0)) == 0
    assert float(posterior_variance(torch.tensor(0.0), 1.0, 3.0)) == 3


def test_psnr_chance_is_that_of_draws():
    image = torch.rand(48, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ratio, square = 0.02, float(image.square().mean())
    noise = torch.randn(20_000, 48, generator=torch.Generator().manual_seed(3)).double()
    reached = -10 * (ratio * image.norm() * noise).square().mean(1).log10()
    expected = image_psnr(ratio, 48, square)
    for level in (expected - 1, expected, expected + 1):
        share = float((reached >= level).double().mean())
        assert psnr_chance(ratio, 48, level, square) == pytest.approx(share, abs=0.015)
    with pytest.raises(ValueError, match="noise_to_clip"):
        psnr_chance(0.0, 48, 20.0)
