"""The estimators on networks of the field, against dense float64; and what the I²F means."""

import pytest
import torch
from scored import small_network
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, LeNet, ResNet18, initialize
from flwr_leakage.operators import AngularJacobian, SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral import (
    choose_smallest_eigenvalue,
    gradient_start,
    largest_eigenvalue,
    last_layer_start,
    solve_damped,
    spectral_sum,
)
from flwr_leakage.spectral.estimate import normalize_rows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lenet():
    model = initialize(LeNet((1, 28, 28), 10, num_convolutions=3), "uniform", generator())
    batch = embedded_mnist(mean=(0.0,), std=(1.0,))[1].batch([0])
    return model, batch


def trained_lenet():
    """More than half of the test digits right, and λmax/λmin beyond 1e7."""
    model, batch = lenet()
    train = embedded_mnist(mean=(0.0,), std=(1.0,))[0].batch(list(range(2000)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for chosen in torch.randperm(2000, generator=generator()).repeat(3).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(train.inputs[chosen]), train.targets[chosen]).backward()
        optimizer.step()
    return model, batch


def convnet():
    model = ConvNet((3, 12, 12), 10, 8, (1, 2, 2), (1, 2, 2), (), use_batch_norm=False)
    return initialize(model, "default", generator()), synthetic((2, 3, 12, 12))


def resnet():
    model = ResNet18((3, 6, 6), 10, width=4)
    return initialize(model, "default", generator()), synthetic((1, 3, 6, 6))


def synthetic(shape):
    """Smooth inputs: blurred noise."""
    noise = torch.rand(shape, generator=generator(1))
    blurred = F.avg_pool2d(noise, 3, 1, 1)
    return Batch(blurred, torch.arange(shape[0]))


@pytest.fixture(
    scope="module",
    params=[lenet, trained_lenet, convnet, pytest.param(resnet, marks=pytest.mark.slow)],
)
def dense(request):
    """The operator, JJᵀ's eigenvalues and eigenvectors, and those of the angular operator."""
    model, batch = request.param()
    gradient_map = GradientMap(model)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    operator = SampleJacobian(gradient_map, params, Batch(batch.inputs.double(), batch.targets))
    J = operator.to_dense().transpose(1, 2)
    direction = normalize_rows(operator.value)[0]
    turned = J - (J @ direction[..., None]) * direction[:, None]
    squared = (operator.value**2).sum(1)[:, None, None]
    eigenvalues, vectors = torch.linalg.eigh(J @ J.transpose(1, 2))
    angular = torch.linalg.eigvalsh(turned @ turned.transpose(1, 2) / squared)
    return operator, eigenvalues, vectors, AngularJacobian(operator, operator.value), angular


def test_the_maxima_are_within_a_thousandth_in_twelve_products(dense):
    operator, eigenvalues, _, angular, directions = dense
    start = last_layer_start(operator, operator.last_layer(), generator())
    for op, exact in ((operator, eigenvalues[:, -1]), (angular, directions[:, -1])):
        found = largest_eigenvalue(op, start, 0.0, max_steps=12).estimate
        torch.testing.assert_close(found.value, exact, rtol=1e-3, atol=0)


def test_the_last_layer_s_start_takes_over_most_steps_where_eigenvalues_stand_close():
    model = ConvNet((3, 32, 32), 10, 16, (1, 2, 2), (1, 2, 2), (), use_batch_norm=False)
    gradient_map = GradientMap(initialize(model, "default", generator()))
    params = {name: value.double() for name, value in gradient_map.params.items()}
    batch = synthetic((4, 3, 32, 32))
    operator = SampleJacobian(gradient_map, params, Batch(batch.inputs.double(), batch.targets))
    exact = largest_eigenvalue(operator, gradient_start(operator, generator()), 1e-9, 200)
    errors = []
    for start in (
        gradient_start(operator, generator()),
        last_layer_start(operator, operator.last_layer(), generator()),
    ):
        found = largest_eigenvalue(operator, start, 0.0, max_steps=8).estimate
        errors.append(float((1 - found.value / exact.estimate.value).max()))
    assert errors[1] < 0.1 * errors[0]


@pytest.mark.parametrize("damping", [1e-3, 1e-6])
def test_the_influence_is_within_a_thousandth(dense, damping):
    operator, eigenvalues, vectors, _, _ = dense
    delta = torch.randn(operator.value.shape, generator=generator(2), dtype=torch.float64)
    projected = torch.einsum("snk,sn->sk", vectors, operator.rmatvec(delta))
    exact = (projected / (eigenvalues + damping * eigenvalues[:, -1:])).norm(dim=1)
    solved = solve_damped(operator, delta, (damping,), 1e-3, max_steps=1000)
    assert bool(solved.converged.all())
    torch.testing.assert_close(solved.norms[:, 0], exact, rtol=1e-3, atol=0)


def test_the_minimum_is_right_or_unresolved(dense):
    operator, eigenvalues, _, _, _ = dense
    found = choose_smallest_eigenvalue(operator, generator(3))
    for value, resolved, exact, top in zip(
        found.value, found.converged, eigenvalues[:, 0], eigenvalues[:, -1], strict=True
    ):
        well_conditioned = top / exact.clamp_min(1e-300) < 1e7
        if well_conditioned:
            assert bool(resolved)
        if bool(resolved):
            tolerance = 1e-2 if well_conditioned else 1e-4
            assert float(value) == pytest.approx(float(exact), rel=tolerance)
        else:
            assert float(value) >= float(exact) * (1 - 1e-6)


def test_the_trace_of_the_inverse_is_within_five_percent(dense):
    operator, eigenvalues, _, _, _ = dense
    exact = (1 / (eigenvalues + 1e-3 * eigenvalues[:, -1:])).sum(1)
    found = spectral_sum(operator, lambda x, top: 1 / (x + 1e-3 * top), generator(4), 10)
    torch.testing.assert_close(found.estimate.value, exact, rtol=5e-2, atol=0)


@pytest.mark.parametrize("noise_std", [1e-5, 1e-4, 1e-3])
def test_gauss_newton_from_the_truth_lands_at_the_influence(noise_std):
    """The meaning of I²F: how far off the best answer to a perturbed gradient is."""
    gradient_map = GradientMap(small_network())
    params = {name: value.double() for name, value in gradient_map.params.items()}
    truth = Batch(torch.rand(1, 1, 6, 6, generator=generator()).double(), torch.tensor([2]))
    operator = SampleJacobian(gradient_map, params, truth)
    delta = noise_std * torch.randn(operator.num_outputs, generator=generator(5)).double()
    influence = solve_damped(operator, delta[None], (1e-12,), 1e-6, 100)
    assert bool(influence.converged.all())
    released = operator.value[0] + delta
    x = truth.inputs.clone()
    for _ in range(20):
        jacobian = SampleJacobian(gradient_map, params, Batch(x, truth.targets)).to_dense()[0]
        residual = released - ravel(gradient_map(params, Batch(x, truth.targets)))
        step = torch.linalg.lstsq(jacobian, residual, driver="gelsd").solution
        x = x + step.reshape(x.shape)
        if float(step.norm()) < 1e-10:
            break
    ratio = float((x - truth.inputs).norm()) / float(influence.norms)
    assert 0.95 <= ratio <= 1.2
