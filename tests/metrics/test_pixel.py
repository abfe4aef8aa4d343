import math

import numpy as np
import pytest
import torch

from flwr_leakage.metrics import mse, psnr, rmse, ssim
from flwr_leakage.metrics.pixel import fit_brightness_and_contrast

IMAGES = torch.rand(2, 3, 3, 16, 20, generator=torch.Generator().manual_seed(0)).double()


def test_mse_rmse_and_psnr_are_per_sample():
    ours, theirs = IMAGES
    expected = [np.mean((a.numpy() - b.numpy()) ** 2) for a, b in zip(ours, theirs, strict=True)]
    assert mse(ours, theirs).tolist() == pytest.approx(expected)
    assert rmse(ours, theirs).tolist() == pytest.approx(np.sqrt(expected))
    decibels = [-10 * math.log10(value) for value in expected]
    assert psnr(ours, theirs).tolist() == pytest.approx(decibels)
    assert psnr(ours[:1], theirs[:1]).tolist() == pytest.approx(decibels[:1])


def test_psnr_of_a_known_error():
    truth = torch.full((1, 1, 4, 4), 0.5)
    assert psnr(truth + 0.1, truth).item() == pytest.approx(20.0, abs=1e-4)
    assert psnr(truth, truth).item() == math.inf


def wang_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Wang et al. 2004, eq. 13, window by window: Gaussian 11×11, σ = 1.5, K = (0.01, 0.03)."""
    offset = np.arange(11) - 5
    weights = np.exp(-(offset**2) / (2 * 1.5**2))
    window = np.outer(weights, weights) / weights.sum() ** 2
    values = []
    for channel in range(x.shape[0]):
        for i in range(x.shape[1] - 10):
            for j in range(x.shape[2] - 10):
                a, b = x[channel, i : i + 11, j : j + 11], y[channel, i : i + 11, j : j + 11]
                ma, mb = (window * a).sum(), (window * b).sum()
                va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
                cov = (window * (a - ma) * (b - mb)).sum()
                values.append(
                    (2 * ma * mb + 1e-4)
                    * (2 * cov + 9e-4)
                    / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
                )
    return float(np.mean(values))


def test_ssim_equals_the_definition():
    ours, theirs = IMAGES
    mixed = 0.7 * theirs + 0.3 * ours
    expected = [wang_ssim(a.numpy(), b.numpy()) for a, b in zip(mixed, theirs, strict=True)]
    assert ssim(mixed, theirs).tolist() == pytest.approx(expected, abs=1e-6)
    assert ssim(mixed[:1], theirs[:1]).tolist() == pytest.approx(expected[:1], abs=1e-6)
    assert ssim(theirs, theirs).tolist() == pytest.approx([1.0] * 3)


def test_ssim_names_images_that_are_too_small():
    with pytest.raises(ValueError, match="at least 11×11 for SSIM, got 8×16"):
        ssim(torch.rand(1, 1, 8, 16), torch.rand(1, 1, 8, 16))


def test_a_fit_finds_brightness_and_contrast_and_makes_nothing_of_what_shows_nothing():
    truth = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(4)).double()
    found = 0.1 * truth + torch.tensor([0.1, 0.4, 0.8]).reshape(3, 1, 1, 1)
    torch.testing.assert_close(fit_brightness_and_contrast(found, truth), truth)
    level = truth.mean((1, 2, 3), keepdim=True).expand_as(truth)
    for nothing in (torch.full_like(truth, 0.3), 1 - truth):  # constant, and a negative contrast
        torch.testing.assert_close(fit_brightness_and_contrast(nothing, truth), level)


def test_no_other_brightness_and_contrast_is_nearer():
    truth, found = torch.rand(2, 1, 1, 5, 5, generator=torch.Generator().manual_seed(5)).double()
    found = 0.6 * found + 0.4 * truth
    best = mse(fit_brightness_and_contrast(found, truth), truth)
    grid = torch.linspace(0, 3, 31)
    others = [mse(a * found + b, truth) for a in grid for b in torch.linspace(-1, 1, 41)]
    assert best <= min(others)
