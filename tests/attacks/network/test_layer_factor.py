import pytest
import torch

from flwr_leakage.attacks.network.linear import factorize


def gradient(samples=6, units=40, width=60, dead=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    errors = torch.randn(units, samples, generator=generator, dtype=torch.float64)
    errors[:dead] = 0
    inputs = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return errors, inputs


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3])
def test_the_rank_is_the_number_of_samples_whatever_rows_are_dead(noise):
    errors, inputs = gradient()
    generator = torch.Generator().manual_seed(1)
    disturbance = noise * torch.randn(25, 61, generator=generator, dtype=torch.float64)
    weight, bias = errors @ inputs, errors.sum(1)
    weight[15:] += disturbance[:, :-1]
    bias[15:] += disturbance[:, -1]
    factor = factorize(weight, bias, 30, generator)  # the client may report another number
    assert factor.rank == 6
    assert not factor.left[:15].any()
    if noise:
        assert factor.noise == pytest.approx(noise, rel=0.1)
    torch.testing.assert_close(factor.left @ factor.right, weight, atol=10 * noise + 1e-12, rtol=0)


def test_rounding_of_few_rows_is_no_sample():
    # A trained network gives most classes next to nothing, and their rows less rounding each.
    errors, inputs = gradient(samples=2, units=10, width=2000, dead=0)
    errors[2:] *= 0.2 ** torch.arange(8, dtype=torch.float64)[:, None]
    weight, bias = (each.float().double() for each in (errors @ inputs, errors.sum(1)))
    factor = factorize(weight, bias, 2, torch.Generator().manual_seed(0))
    assert factor.rank == 2


def test_too_many_samples_are_refused():
    errors, inputs = gradient(samples=30)
    with pytest.raises(ValueError, match="too many samples for its size"):
        factorize(errors @ inputs, errors.sum(1), 30, torch.Generator().manual_seed(0))


def test_what_is_left_is_the_gradient_of_the_other_samples():
    errors, inputs = gradient()
    factor = factorize(errors @ inputs, errors.sum(1), 6, torch.Generator().manual_seed(0))
    columns = factor.left.T @ errors
    duals = torch.linalg.inv(columns)
    assert torch.allclose(duals @ factor.bias, torch.ones(6, dtype=torch.float64))
    rest, lift = factor.remainder(duals[:2], columns[:, :2])
    assert rest.rank == 4
    torch.testing.assert_close(rest.left @ rest.right, errors[:, 2:] @ inputs[2:])
    torch.testing.assert_close(rest.left @ rest.bias, errors[:, 2:].sum(1))
    torch.testing.assert_close(rest.right, lift @ factor.right)


def test_a_sample_of_a_tiny_error_counts_in_double_precision():
    """Differences of squares would tell noise of 1e-8 of the largest singular value."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(size, 6, generator=generator, dtype=torch.float64)).Q
        for size in (300, 401)
    )
    sizes = torch.tensor([9.0, 1e-2, 1e-4, 1e-6, 1e-7, 2e-8], dtype=torch.float64)
    whole = left * sizes @ right.T
    factor = factorize(whole[:, :-1], whole[:, -1], 6, generator)
    assert factor.rank == 6
    assert factor.noise < 1e-15
