import pytest
import torch
from relu_spellings import SPELLINGS
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.network.blur import (
    blurred_maximum,
    blurred_relu,
    blurring,
    measure,
)
from flwr_leakage.attacks.network.calls import read_call


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("width", [0.3, 2.0])
def test_blurred_relu_is_the_mean_over_noise(width):
    z = torch.linspace(-3, 3, 13, dtype=torch.float64)
    # Quantiles in place of draws: the mean of these is exact to 1e-4.
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    noise = torch.special.ndtri(uniform)
    mean = (z[:, None] + width * noise).clamp_min(0).mean(1)
    found = blurred_relu(z, torch.tensor(width, dtype=torch.float64))
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-4)


def test_first_and_second_derivatives_are_those_of_the_mean():
    z, width = draw(20).requires_grad_(), torch.tensor(0.7, dtype=torch.float64)

    def plain(z):
        normal = torch.distributions.Normal(0.0, 1.0)
        return z * normal.cdf(z / width) + width * normal.log_prob(z / width).exp()

    (slope,) = torch.autograd.grad(blurred_relu(z, width).sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    (expected,) = torch.autograd.grad(plain(z).sum(), z, create_graph=True)
    torch.testing.assert_close(slope, expected)
    torch.testing.assert_close(curvature, torch.autograd.grad(expected.sum(), z)[0])


def test_maximum_leaves_equal_values_and_nears_the_maximum():
    a, b = draw(50), draw(50, seed=1)
    narrow = torch.tensor(1e-6, dtype=torch.float64)
    torch.testing.assert_close(
        blurred_maximum(a, b, narrow), torch.maximum(a, b), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(blurred_maximum(a, a, torch.ones(()).double()), a)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"kernel_size": 2, "dilation": 2, "stride": 1},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
    ],
)
def test_windows_hold_what_max_pooling_takes_the_maximum_of(settings):
    inputs = draw(2, 3, 8, 9)
    pool = read_call(F.max_pool2d, (inputs,), settings)
    maximum = torch.stack(pool.maps(inputs, -1e4)).amax(0)
    torch.testing.assert_close(maximum, F.max_pool2d(inputs, **settings))


class Written(nn.Module):
    """The same network, each time in other words."""

    def __init__(self, relu, pool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 16, 4)
        self.relu, self.pool = relu, pool

    def forward(self, inputs):
        return self.last(self.pool(self.relu(self.first(inputs))).flatten(1))


POOLS = {
    "module": nn.MaxPool2d(2),
    "functional": lambda z: F.max_pool2d(z, 2),
    "torch": lambda z: torch.max_pool2d(z, 2),
    "stride": lambda z: F.max_pool2d(z, kernel_size=2, stride=2),
    "adaptive": nn.AdaptiveMaxPool2d(4),
    "adaptive functional": lambda z: F.adaptive_max_pool2d(z, (4, 4)),
}


def _gradient(network, inputs, deviations, amount):
    params = dict(network.named_parameters())

    def loss(params):
        logits = torch.func.functional_call(network, params, (inputs,))
        return F.cross_entropy(logits, torch.tensor([1, 3]))

    with blurring(deviations, amount):
        return {k: v.detach() for k, v in torch.func.grad(loss)(params).items()}


@pytest.mark.parametrize("amount", [0.0, 0.8])
@pytest.mark.parametrize(
    ("relu", "pool"), [(r, "module") for r in SPELLINGS] + [("module", p) for p in POOLS]
)
def test_any_spelling_of_a_network_is_blurred_alike(relu, pool, amount):
    inputs = draw(2, 1, 8, 8).float()
    reference = Written(nn.ReLU(), nn.MaxPool2d(2))
    network = Written(SPELLINGS[relu], POOLS[pool])
    deviations = measure(lambda: network(inputs))
    assert [tuple(d.shape) for d in deviations] == [(1, 3, 1, 1), (1, 3, 1, 1)]
    expected = _gradient(reference, inputs, deviations, amount)
    found = _gradient(network, inputs, deviations, amount)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    if amount:
        sharp = _gradient(reference, inputs, deviations, 0.0)
        assert float((sharp["first.weight"] - expected["first.weight"]).norm()) > 1e-3


@pytest.mark.parametrize(
    "settings", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}]
)
def test_pooling_takes_a_width_of_each_of_its_inputs(settings):
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 3, 6, 6, generator=draws, dtype=torch.float64)

    def pooled(width):
        with blurring([width], 1.0):
            return F.max_pool2d(inputs, **settings)

    shared = torch.full((1, 3, 1, 1), 0.3, dtype=torch.float64)
    torch.testing.assert_close(pooled(shared.expand(2, 3, 6, 6)), pooled(shared))
    sharp = torch.full_like(inputs, 1e-9)
    torch.testing.assert_close(pooled(sharp), F.max_pool2d(inputs, **settings))
    wide = sharp.clone()
    wide[:, :, :2, :2] = 0.3  # the first window alone
    changed = (pooled(wide) - pooled(sharp)).abs().amax((0, 1)) > 1e-6
    assert changed[0, 0] and not changed[2:, 2:].any()


def test_in_place_replaces_the_tensor_itself():
    deviations = [torch.tensor(1.0)]
    z = torch.zeros(3)
    with blurring(deviations, 1.0):
        F.relu(z, inplace=True)
    torch.testing.assert_close(z, torch.full((3,), (2 * torch.pi) ** -0.5))


def test_pooling_that_is_asked_for_its_indices_is_left_alone():
    inputs = draw(1, 1, 4, 4)
    with blurring([torch.tensor(1.0)], 1.0):
        values, indices = F.max_pool2d(inputs, 2, return_indices=True)
    torch.testing.assert_close(values, F.max_pool2d(inputs, 2))
    assert indices.shape == values.shape


def test_a_channel_that_is_always_zero_is_blurred_to_finite_values():
    network = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2)).double()
    with torch.no_grad():
        network[0].bias[0] = -100  # its ReLU is dead: pooling takes in zeros only
    deviations = measure(lambda: network(draw(16, 1, 4, 4)))
    assert all(bool((each > 0).all()) for each in deviations)
    inputs = draw(1, 1, 4, 4, seed=1).requires_grad_()
    with blurring(deviations, 1.0):
        outputs = network(inputs)
    (slope,) = torch.autograd.grad(outputs.square().sum(), inputs)
    assert bool(torch.isfinite(outputs).all() and torch.isfinite(slope).all())
