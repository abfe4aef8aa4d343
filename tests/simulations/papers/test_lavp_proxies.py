"""LAVP's proxies against dense Jacobians, and what reads them."""

import math

import pytest
import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, ResNet8
from flwr_leakage.operators import BatchJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from simulations.papers.alc_study import batch_constants
from simulations.papers.lavp_proxies import dense_gram, exact_proxies, published_proxies
from simulations.papers.local_convergence import final_loss

SHAPE = (1, 6, 6)


@pytest.fixture(scope="module")
def gradient_map():
    torch.manual_seed(1)
    return GradientMap(LeNet(SHAPE, 3, channels=4, num_convolutions=1, activation="tanh"))


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(2)
    return Batch(torch.randn(2, *SHAPE, generator=generator), torch.tensor([0, 2]))


def jacobian(gradient_map, sample):
    """J = ∇ₓ∇_θL (N, P) and g in float64, by plain autograd."""
    params = {name: value.double() for name, value in gradient_map.params.items()}

    def gradient(flat):
        return ravel(gradient_map(params, Batch(flat.reshape(1, *SHAPE), sample.targets)))

    point = sample.inputs.double().flatten()
    return torch.autograd.functional.jacobian(gradient, point).T, gradient(point)


@pytest.mark.parametrize("memory_bytes", [2**30, 0], ids=["dense", "products"])
def test_both_routes_give_the_dense_hessian(gradient_map, samples, memory_bytes):
    J, _ = jacobian(gradient_map, samples[:1])
    found = dense_gram(gradient_map, samples[:1], memory_bytes)
    torch.testing.assert_close(found, J @ J.T, rtol=1e-4, atol=1e-6)


def test_exact_proxies_are_the_ends_of_both_hessians(gradient_map, samples):
    found = exact_proxies(gradient_map, samples)
    for index in range(2):
        J, g = jacobian(gradient_map, samples[index : index + 1])
        unit = g / g.norm()
        angular = J @ (torch.eye(len(g)).double() - torch.outer(unit, unit)) @ J.T / g.norm() ** 2
        for name, hessian in (("", J @ J.T), ("ang_", angular)):
            spectrum = torch.linalg.eigvalsh(hessian)
            assert found[f"{name}max"][index] == pytest.approx(float(spectrum[-1]), rel=1e-4)
            assert found[f"{name}min"][index] == pytest.approx(float(spectrum[0]), rel=1e-2)
        assert found["grad_norm"][index] == pytest.approx(float(g.norm()), rel=1e-5)


def test_an_eigenvalue_of_a_jacobian_without_full_rank_is_zero(samples):
    torch.manual_seed(1)
    narrow = LeNet(SHAPE, 3, channels=1, num_convolutions=1, activation="tanh")
    # 9 features and 25 weights that see them: fewer than 36 pixels.
    assert exact_proxies(GradientMap(narrow), samples)["min"] == [0.0, 0.0]


def test_the_published_estimator_finds_the_largest_and_overrates_the_smallest(
    gradient_map, samples
):
    exact = exact_proxies(gradient_map, samples)
    generator = torch.Generator().manual_seed(0)
    found = published_proxies(gradient_map, samples, 20, 1e-2, generator)
    for index in range(2):
        assert found["max"][index] == pytest.approx(exact["max"][index], rel=0.1)
        assert found["ang_max"][index] == pytest.approx(exact["ang_max"][index], rel=0.2)
        assert found["min"][index] > exact["min"][index]


def test_descent_beside_the_truth_converges_at_a_small_rate_only(gradient_map, samples):
    exact = exact_proxies(gradient_map, samples)
    start = final_loss(gradient_map, samples, "L2", 1e-12, 1, 2, 0.1, 0)
    rate = 0.5 / max(exact["max"])
    small = final_loss(gradient_map, samples, "L2", rate, 30, 2, 0.1, 0)
    large = final_loss(gradient_map, samples, "L2", 40 * rate, 30, 2, 0.1, 0)
    assert start.shape == (2, 2) and bool((small < 0.2 * start).all())
    assert bool((large > start).all())
    cosine = final_loss(gradient_map, samples, "cosine", 1e-12, 1, 2, 0.1, 0)
    assert bool((cosine > 0).all() and (cosine < 1).all())


@pytest.mark.parametrize("mode", ["running", "batch"])
def test_constants_of_a_batch_lie_below_the_norm_of_its_jacobian(mode, samples):
    torch.manual_seed(3)
    gradient_map = GradientMap(ResNet8(SHAPE, 3, width=2), batch_norm=mode)
    plain, angular, norm = batch_constants(gradient_map, samples, 1e-4, 5, 0)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    wide = Batch(samples.inputs.double(), samples.targets)
    operator = BatchJacobian(gradient_map, params, wide)
    largest = float(torch.linalg.matrix_norm(operator.to_dense()[0], ord=2))
    assert 0.02 * largest < plain <= 1.01 * largest and angular > 0
    assert norm == pytest.approx(float(operator.value.norm()))
    assert math.isfinite(angular)
