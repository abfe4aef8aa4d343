"""ε, guesses, images and canaries against integrals, simulations and Opacus."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from flwr_leakage.bounds import guess_bound, image_psnr
from flwr_leakage.defenses.accounting import (
    _epsilon_between,
    _hockey_stick,
    canary,
    canary_epsilon,
    gaussian_delta,
    gaussian_epsilon,
)


def _integral(m0, s0, m1, s1, epsilon):
    p, q = stats.norm(m0, s0), stats.norm(m1, s1)
    grid = torch.linspace(-25, 25, 20_001, dtype=torch.float64).numpy()
    gain = p.pdf(grid) - math.exp(epsilon) * q.pdf(grid)
    return float(integrate.simpson(gain.clip(min=0), x=grid))


@settings(max_examples=25)
@given(st.floats(0.05, 6), st.floats(0, 12))
def test_delta_is_the_integral_of_its_definition(mu, epsilon):
    expected = _integral(mu, 1, 0, 1, epsilon)
    assert gaussian_delta(mu, epsilon) == pytest.approx(expected, rel=1e-4, abs=1e-9)


@given(st.floats(1e-3, 1e5), st.floats(1e-12, 0.5))
def test_epsilon_is_where_delta_is_met(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-4)
    else:
        assert gaussian_delta(mu, 0.0) <= delta


@pytest.mark.parametrize(("multiplier", "steps"), [(1.0, 1), (1.0, 10), (2.0, 100), (5.0, 3)])
def test_epsilon_lies_just_below_the_bounds_of_opacus(multiplier, steps):
    accountants = pytest.importorskip("opacus.accountants")
    exact = gaussian_epsilon(math.sqrt(steps) / multiplier, 1e-5)
    rdp = accountants.RDPAccountant()
    rdp.history = [(multiplier, 1.0, steps)]
    assert exact <= rdp.get_epsilon(1e-5) <= 1.35 * exact
    prv = accountants.PRVAccountant()
    prv.history = [(multiplier, 1.0, steps)]
    assert prv.get_epsilon(1e-5) == pytest.approx(exact, rel=0.01)


def test_no_noise_and_no_effect():
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert image_psnr(0.0, 10) == math.inf
    assert guess_bound(0.0, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: gaussian_epsilon(-1.0, 1e-5),
        lambda: gaussian_epsilon(math.nan, 1e-5),
        lambda: gaussian_epsilon(1.0, 0.0),
        lambda: gaussian_epsilon(1.0, 1.0),
        lambda: guess_bound(1.0, 0.0),
        lambda: canary_epsilon(torch.zeros(1), 10),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="got"):
        wrong()


def test_the_best_guess_reaches_its_bound_and_no_more():
    """Two records, the likelihood-ratio guess: its chance is Φ(Φ⁻¹(κ) + μ) at κ = 1/2 and μ/2."""
    mu = 1.2
    noise = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    truth = torch.arange(200_000) % 2
    guess = (mu * truth + noise > mu / 2).long()
    reached = float((guess == truth).double().mean())
    assert reached == pytest.approx(float(stats.norm.cdf(mu / 2)), abs=0.005)
    assert reached < guess_bound(mu, 0.5)


def test_image_psnr_is_that_of_the_image_read_off():
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3072, generator=generator)
    clip, std = 2.0, 0.01
    update = image * clip / image.norm() + std * torch.randn(3072, generator=generator)
    read = update * image.norm() / clip
    reached = -10 * math.log10(float((read - image).square().mean()))
    bound = image_psnr(std / clip, 3072, float(image.square().mean()))
    assert reached == pytest.approx(bound, abs=0.3)


@settings(max_examples=25)
@given(st.floats(-3, 3), st.floats(0.5, 2), st.floats(-3, 3), st.floats(0.5, 2), st.floats(0, 6))
def test_hockey_stick_divergence_is_its_integral(m0, s0, m1, s1, epsilon):
    expected = _integral(m0, s0, m1, s1, epsilon)
    assert _hockey_stick(m0, s0, m1, s1, epsilon) == pytest.approx(expected, rel=1e-3, abs=1e-8)


def test_unequal_spreads_are_told_apart_and_equal_ones_agree():
    assert _epsilon_between(1.0, 1.0 + 1e-9, 1e-5) == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert _epsilon_between(1.0, 2.0, 1e-5) > 2 * _epsilon_between(1.0, 1.0, 1e-5)
    assert math.isfinite(_epsilon_between(300.0, 0.5, 1e-5))


def test_canaries_are_unit_directions_of_their_own():
    like = {"w": torch.zeros(40, 50), "b": torch.zeros(50, dtype=torch.float64)}
    first, again, other = canary(like, 3.0, 0, 7), canary(like, 3.0, 0, 7), canary(like, 3.0, 1, 7)
    flat = [torch.cat([v.double().flatten() for v in c.values()]) for c in (first, again, other)]
    assert [float(v.norm()) for v in flat] == pytest.approx([3.0] * 3)
    assert torch.equal(flat[0], flat[1])
    assert abs(float(flat[0] @ flat[2])) / 9 < 5 / 2050**0.5
    assert first["b"].dtype == torch.float64


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0])
def test_canaries_show_the_epsilon_of_a_mechanism_that_is_known(multiplier):
    count, dimension = 100, 60_000
    like = {"w": torch.zeros(dimension)}
    directions = torch.stack([canary(like, 1.0, i, 3)["w"] for i in range(count)])
    noise = torch.randn(dimension, generator=torch.Generator().manual_seed(4))
    release = directions.sum(0) + multiplier * noise
    estimate = canary_epsilon(directions @ release / release.norm(), dimension)
    # The mean of 100 cosines is known to 0.1 of the null's spread.
    around = [gaussian_epsilon(1 / multiplier + step, 1e-5) for step in (-0.3, 0.3)]
    assert around[0] < estimate.epsilon < around[1]
    assert estimate.lower < estimate.epsilon
    assert estimate.lower < gaussian_epsilon(1 / multiplier, 1e-5)


def test_canaries_that_leave_no_trace_show_nothing():
    cosines = torch.randn(500, generator=torch.Generator().manual_seed(0)) / 1000**0.5
    estimate = canary_epsilon(cosines - cosines.mean(), 1000)
    assert estimate.epsilon == estimate.lower == 0
