"""ε, guesses, images and canaries against integrals, simulations and Opacus."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from flwr_leakage.bounds import guess_bound, image_psnr
from flwr_leakage.defenses.accounting import (
    ADJACENCIES,
    _epsilon_between,
    _hockey_stick,
    canary,
    canary_epsilon,
    dp_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    replace_one_rdp,
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


SAMPLED = [
    (1.0, 0.01, 1000, 1e-5),
    (0.8, 0.1, 50, 1e-5),
    (2.0, 0.5, 20, 1e-6),
    (0.3, 0.2, 10, 1e-5),
]


@pytest.mark.parametrize(("multiplier", "rate", "steps", "delta"), SAMPLED)
def test_epsilon_of_sampled_steps_is_opacus_own(multiplier, rate, steps, delta):
    accountants = pytest.importorskip("opacus.accountants")
    rdp, prv = accountants.RDPAccountant(), accountants.PRVAccountant()
    rdp.history = prv.history = [(multiplier, rate, steps)]
    found = dp_epsilon(multiplier, rate, steps, delta, "add-or-remove")
    # More orders than Opacus' own, so that the bound is a little lower at most.
    assert 0.995 * rdp.get_epsilon(delta) <= found <= rdp.get_epsilon(delta) * (1 + 1e-9)
    assert prv.get_epsilon(delta, eps_error=0.01) - 0.02 < found
    replaced = dp_epsilon(multiplier, rate, steps, delta)
    assert found < replaced < dp_epsilon(multiplier, 1.0, steps, delta)


@pytest.mark.parametrize(("multiplier", "rate", "steps", "delta"), SAMPLED[:3])
def test_epsilon_lies_above_that_of_dp_accounting(multiplier, rate, steps, delta):
    dp = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    event = dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps
    )
    for adjacency, name in (("replace-one", "REPLACE_ONE"), ("add-or-remove", "ADD_OR_REMOVE_ONE")):
        relation = dp.NeighboringRelation[name]
        tight = pld.PLDAccountant(relation).compose(event).get_epsilon(delta)
        assert tight < dp_epsilon(multiplier, rate, steps, delta, adjacency) < 1.25 * tight


@pytest.mark.parametrize(("multiplier", "rate"), [(1.0, 0.01), (0.7, 0.3), (4.0, 0.9), (0.2, 0.5)])
def test_the_divergence_of_a_replaced_record_is_the_integral_of_its_definition(multiplier, rate):
    for order in (1.5, 3.0, 7.0):
        z = torch.linspace(-15, 15 + 14 / multiplier, 400_001, dtype=torch.float64).numpy()
        norm = [stats.norm(m / multiplier).logpdf(z) for m in (0, 1, -1)]
        first, second = (
            np.logaddexp(math.log1p(-rate) + norm[0], math.log(rate) + norm[k]) for k in (1, 2)
        )
        power = order * first + (1 - order) * second
        expected = power.max() + math.log(integrate.simpson(np.exp(power - power.max()), x=z))
        (found,) = replace_one_rdp(rate, multiplier, [order])
        assert found == pytest.approx(expected / (order - 1), rel=1e-6)
    # All records in every step: the Gaussian mechanism's α Δ²/2σ² with Δ = 2.
    (whole,) = replace_one_rdp(1.0, multiplier, [3.0])
    assert whole == pytest.approx(3 * 4 / (2 * multiplier**2), rel=1e-9)


def test_no_pair_of_records_diverges_more_than_opposite_ones():
    """Records at other angles and lengths, on a grid of the plane that they span."""
    rate, std, order = 0.3, 0.8, 4.0
    (bound,) = replace_one_rdp(rate, std, [order])
    axis = torch.linspace(-9, 9, 901, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)

    def density(record):
        shifted = ((grid - torch.tensor(record)) ** 2).sum(1)
        bells = [torch.exp(-square / 2 / std**2) for square in ((grid**2).sum(1), shifted)]
        return ((1 - rate) * bells[0] + rate * bells[1]) / (2 * math.pi * std**2)

    def divergence(record, other):
        power = density(record) ** order * density(other) ** (1 - order)
        return math.log(float(power.sum()) * 0.02**2) / (order - 1)

    assert divergence((1.0, 0.0), (-1.0, 0.0)) == pytest.approx(bound, rel=1e-4)
    for angle in (0.5, 1.5, 2.5, 3.0):
        for length in (0.3, 1.0):
            other = (length * math.cos(angle), length * math.sin(angle))
            assert divergence((1.0, 0.0), other) < bound
            assert divergence(other, (1.0, 0.0)) < bound


def test_epsilon_of_whole_steps_is_the_gaussian_mechanisms():
    assert dp_epsilon(2.0, 1.0, 4, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1e-5))
    assert dp_epsilon(2.0, 1.0, 4, 1e-5, "add-or-remove") == gaussian_epsilon(1.0, 1e-5)
    assert dp_epsilon(0.0, 0.5, 1, 1e-5) == math.inf
    assert dp_epsilon(1.0, 0.5, 0, 1e-5) == 0.0


def test_little_noise_costs_no_grid():
    pytest.importorskip("opacus")
    for adjacency in ADJACENCIES:
        found = dp_epsilon(1e-4, 0.5, 3, 1e-5, adjacency)
        assert math.isfinite(found)
        assert found <= dp_epsilon(1e-4, 1.0, 3, 1e-5, adjacency)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be ≥ 0"),
        ({"sample_rate": 0.0}, "sample_rate must lie in"),
        ({"sample_rate": 1.5}, "sample_rate must lie in"),
        ({"num_steps": -1}, "num_steps must be ≥ 0"),
        ({"delta": 0.0}, "delta must lie in"),
        ({"delta": 1.0}, "delta must lie in"),
        ({"adjacency": "remove"}, "adjacency must be one of replace-one, add-or-remove"),
    ],
)
def test_accounting_out_of_range(settings, said, unchecked):
    given = {"noise_multiplier": 1.0, "sample_rate": 1.0, "num_steps": 1, "delta": 0.1}
    with pytest.raises(ValueError, match=said):
        dp_epsilon(**given | settings)


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
