import pytest
import torch
from scipy import special, stats

from flwr_leakage.defenses import gaussian_epsilon
from flwr_leakage.members import one_run_epsilon


def canaries(mu, seed, count=200):
    """Canaries in orthogonal directions of a sum with Gaussian noise, whose ε is known."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.rand(count, generator=generator) < 0.5
    return -mu * inside - torch.randn(count, generator=generator), inside


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_the_bound_lies_below_the_true_epsilon_in_at_least_95_percent_of_runs(mu):
    true = gaussian_epsilon(mu, 1e-5)
    above = sum(one_run_epsilon(*canaries(mu, seed)) > true for seed in range(40))
    # More than these of 40 have a chance of 1 % where 5 % are allowed.
    assert above <= int(stats.binom.ppf(0.99, 40, 0.05))


def test_little_noise_shows_much():
    found = [one_run_epsilon(*canaries(6.0, seed, 1000)) for seed in range(3)]
    assert min(found) > 4


def test_without_delta_it_is_the_limit_of_clopper_and_pearson():
    inside = torch.arange(100) < 50
    values = inside.logical_not().double() + 0.001 * torch.arange(100)
    inside[:7], inside[-5:] = False, True  # 12 of 100 guesses are wrong
    low = stats.binomtest(88, 100, alternative="greater").proportion_ci(0.95, "exact").low
    found = one_run_epsilon(values, inside, delta=0.0, shares=(1.0,))
    assert found == pytest.approx(float(special.logit(low)), abs=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_cannot_be_meant():
    with pytest.raises(ValueError, match="of the same canaries, at least 2, got 3 and 2"):
        one_run_epsilon(torch.zeros(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="confidence in"):
        one_run_epsilon(torch.zeros(2), torch.ones(2, dtype=torch.bool), confidence=1.0)
