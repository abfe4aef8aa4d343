"""Bounds as scores against dense float64 formulas, and the noise that they take for known."""

import math

import pytest
import torch
from dense_jacobian import dense_jacobian
from scipy.stats import norm
from scored import make_exposure, measure, small_network
from torch import nn

from flwr_leakage.defenses.base import Defense
from flwr_leakage.defenses.clipping import Clipping
from flwr_leakage.defenses.noise import GaussianNoise, LaplacianNoise
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, Exposure, LocalSchedule
from flwr_leakage.scores import (
    BayesianBound,
    CramerRaoBound,
    FisherLeakage,
    PSNRBound,
    ReconstructionRobustness,
)

NOISE = 1e-2
BOUNDS = {
    "cramer_rao": CramerRaoBound(),
    "bayesian": BayesianBound(),
    "fisher": FisherLeakage(),
    "robustness": ReconstructionRobustness(),
    "psnr": PSNRBound(),
}


def by_name(measurements) -> dict:
    return {found.name: found for found in measurements}


def values(measurement) -> torch.Tensor:
    assert None not in measurement.values, measurement.notes
    return torch.tensor(measurement.values, dtype=torch.float64)


def close(found, expected, rtol=1e-6):
    torch.testing.assert_close(values(found), expected.double(), rtol=rtol, atol=0)


def sample_noise(exposure: Exposure) -> torch.Tensor:
    """σᵢ = σ/wᵢ of noise of the standard deviation ``NOISE`` on the pseudo-gradient."""
    return NOISE / exposure.sample_weights()


def test_cramer_rao_bound_is_the_undamped_expected_influence(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    (found,) = measure(CramerRaoBound(NOISE), gradient_map, exposure)
    J, _ = dense_jacobian(gradient_map, batch)
    inverse = torch.linalg.inv(J @ J.transpose(1, 2))
    trace = inverse.diagonal(dim1=1, dim2=2).sum(1)
    close(found, sample_noise(exposure) * (trace / 36).sqrt(), 1e-5)
    assert found.states == ("lower bound",) * 4 and found.direction == "larger is safer"


def test_the_noise_is_read_from_delta(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    (given,) = measure(CramerRaoBound(NOISE), gradient_map, exposure)
    (read,) = measure(CramerRaoBound(), gradient_map, exposure)
    # 142 parameters tell a standard deviation to 6 %.
    close(read, values(given), 0.25)


def test_bayesian_bound_is_the_posterior_variance(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    (found,) = measure(BayesianBound(NOISE, prior_std=0.5), gradient_map, exposure)
    J, _ = dense_jacobian(gradient_map, batch)
    level = sample_noise(exposure)[:, None, None]
    precision = J @ J.transpose(1, 2) / level**2 + torch.eye(36) / 0.25
    variance = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2).mean(1)
    close(found, variance.sqrt(), 1e-5)
    assert found.states == ("exact",) * 4


@pytest.mark.parametrize("score", [CramerRaoBound, BayesianBound])
def test_quadrature_bounds_the_bound_from_below(score, gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    (exact,) = measure(score(NOISE), gradient_map, exposure)
    few = {"max_dense_inputs": 0, "num_probes": 8}
    (early,) = measure(score(NOISE, max_steps=6, **few), gradient_map, exposure)
    (late,) = measure(score(NOISE, max_steps=36, **few), gradient_map, exposure)
    assert early.states == late.states == ("lower bound",) * 4
    assert "quadrature" in early.notes[0]
    assert bool((values(early) < values(late)).all())
    for found in (early, late):
        for low, bar, high in zip(found.values, found.errors, exact.values, strict=True):
            assert low - bar <= high


def test_a_jacobian_without_full_rank_has_no_cramer_rao_bound(batch):
    torch.manual_seed(0)
    narrow = GradientMap(nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(9, 4)))
    exposure = make_exposure(narrow, batch, noise_std=NOISE)
    (found,) = measure(CramerRaoBound(NOISE), narrow, exposure)
    assert found.values == (None,) * 4 and found.states == ("unresolved",) * 4
    assert "rank 9 of 36" in found.notes[0]
    (bayesian,) = measure(BayesianBound(NOISE), narrow, exposure)
    assert bool((values(bayesian) < 1).all()) and bool((values(bayesian) > (27 / 36) ** 0.5).all())


def test_fisher_leakage(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    found = by_name(measure(FisherLeakage(NOISE, num_probes=300), gradient_map, exposure))
    J, _ = dense_jacobian(gradient_map, batch)
    level = sample_noise(exposure)
    expected = J.norm(dim=(1, 2)) / 6 / level
    for name, truth in (
        ("fisher_leakage", expected),
        ("fisher_leakage_bound_rmse", 1 / expected),
        ("fisher_information_loss", torch.linalg.svdvals(J)[:, 0] / level),
    ):
        close(found[name], truth, 0.05)
        off = (values(found[name]) - truth).abs()
        assert bool((off <= torch.tensor(found[name].errors)).all())
    (tight,) = measure(CramerRaoBound(NOISE), gradient_map, exposure)
    assert bool((values(found["fisher_leakage_bound_rmse"]) < values(tight)).all())


def test_reconstruction_robustness(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    _, gradients = dense_jacobian(gradient_map, batch)
    level = sample_noise(exposure)
    (own,) = measure(ReconstructionRobustness(0.1, noise_std=1.0), gradient_map, exposure)
    mu = gradients.norm(dim=1) / (level / NOISE)
    close(own, torch.tensor(norm.cdf(norm.ppf(0.1) + mu.numpy())), 1e-5)
    clipped = ReconstructionRobustness(0.1, clipping_norm=0.5, num_rounds=9, noise_std=1.0)
    (found,) = measure(clipped, gradient_map, exposure)
    close(found, torch.full((4,), norm.cdf(norm.ppf(0.1) + 3 * 0.5 / 4)), 1e-6)
    assert found.states == ("upper bound",) * 4 and found.direction == "larger leaks more"


def test_psnr_bound_is_that_of_the_image_read_off(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    score = PSNRBound(clipping_norm=2.0, num_rounds=4, data_range=1.0, noise_std=NOISE)
    found = by_name(measure(score, gradient_map, exposure))
    lengths = batch.inputs.flatten(1).double().norm(dim=1)
    rmse = sample_noise(exposure) / 2 * lengths / 2
    close(found["psnr_bound_rmse"], rmse, 1e-5)
    close(found["psnr_bound"], -20 * rmse.log10(), 1e-5)


def test_without_noise_there_is_no_bound_and_the_reason_is_told(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    for score in BOUNDS.values():
        for found in measure(score, gradient_map, exposure):
            assert found.values == (None,) * 4
            assert "no noise" in found.notes[0]


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (GaussianNoise(NOISE), ""),
        (LaplacianNoise(NOISE), "kurtosis"),
        (GradientPruning(0.5), "δ is no independent Gaussian noise"),
        (Clipping(1e-3), "depends on the gradient"),
    ],
)
def test_only_gaussian_noise_of_one_size_is_taken_for_it(defense: Defense, reason, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 40), nn.Sigmoid(), nn.Linear(40, 4))
    gradient_map = GradientMap(model)
    plain = make_exposure(gradient_map, batch, LocalSchedule(1.0, 1, 4))
    released = defense.on_update(plain.raw, Reproducible.from_seed(3))
    exposure = Exposure(plain.params, {}, batch, batch, plain.raw, released)
    (found,) = measure(ReconstructionRobustness(), gradient_map, exposure)
    assert (None in found.values) == bool(reason)
    if reason:
        assert reason in found.notes[0]
        (told,) = measure(ReconstructionRobustness(noise_std=NOISE), gradient_map, exposure)
        assert None not in told.values


@pytest.mark.parametrize("name", BOUNDS)
def test_a_samples_bound_is_its_own(name, gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    whole = measure(BOUNDS[name], gradient_map, exposure, 3)
    part = measure(BOUNDS[name], gradient_map, exposure.select([1, 2]), 3)
    for a, b in zip(whole, part, strict=True):
        assert a.values[1:3] == pytest.approx(b.values, rel=1e-5)


def test_settings_are_checked():
    for make in (
        lambda: CramerRaoBound(-1.0),
        lambda: CramerRaoBound(num_probes=1),
        lambda: CramerRaoBound(precision="float32"),
        lambda: BayesianBound(prior_std=0.0),
        lambda: FisherLeakage(num_probes=1),
        lambda: ReconstructionRobustness(prior=1.0),
        lambda: ReconstructionRobustness(clipping_norm=0.0),
        lambda: PSNRBound(num_rounds=0),
        lambda: PSNRBound(data_range=-1.0),
    ):
        with pytest.raises(ValueError, match="must"):
            make()


def test_nan_in_an_image_leaves_the_others_alone(batch):
    gradient_map = GradientMap(small_network())
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    inputs = batch.inputs.clone()
    inputs[1, 0, 0, 0] = math.nan
    poisoned = Batch(inputs, batch.targets)
    broken = Exposure(exposure.params, {}, poisoned, poisoned, exposure.raw, exposure.released)
    for score in BOUNDS.values():
        for found in measure(score, gradient_map, broken):
            assert found.values[1] is None and None not in (found.values[0], found.values[2])
