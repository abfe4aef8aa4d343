"""Kinks are told by numbers, whatever functions make them."""

import pytest
import torch
from attacked import observe
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.budget import Budget, BudgetExhausted
from flwr_leakage.attacks.inversion.jacobian import calls_kinks, has_kinks, is_rough
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel


class Network(nn.Module):
    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Linear(8 * 16, 30)
        self.c = nn.Linear(30, 4)
        self.activation = activation

    def forward(self, x):
        return self.c(self.activation(self.b(self.activation(self.a(x)).flatten(1))))


def posed(spec, network):
    gradient_map = GradientMap(network.eval())
    batch = Batch(torch.full((1, *spec.shape), 0.3), torch.tensor([1]))
    seen = observe(gradient_map, batch, LocalSchedule(0.1, 1, 1))
    return pose(gradient_map, spec, seen, ThreatModel())


KINKED = {
    "relu": F.relu,
    "relu6": F.relu6,
    "halved": lambda z: (z + z.abs()) / 2,
    "abs": torch.abs,
    "hardtanh": lambda z: F.hardtanh(z, -0.1, 0.1),
    "selu": F.selu,
    "prelu": lambda z: F.prelu(z, torch.full((1,), 0.25, dtype=z.dtype)),
    "rrelu": lambda z: F.rrelu(z),
    "maximum": lambda z: torch.maximum(z, -0.5 * z),
    "sorted": lambda z: z.sort(1).values,
    "half of the units": lambda z: torch.where(
        torch.arange(z[0].numel()).reshape(z[0].shape) % 2 == 0, z.abs(), z.sin()
    ),
}
SMOOTH = {
    "linear": lambda z: z,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "steep": lambda z: torch.tanh(10 * z),
    "softplus": F.softplus,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "square": torch.square,
    "clamped, and never met": lambda z: F.silu(z.clamp(min=-100)),
}


@pytest.mark.parametrize("name", KINKED)
def test_kinks_are_told(spec, name):
    problem = posed(spec, Network(KINKED[name]))
    assert is_rough(problem) and has_kinks(problem)
    by_name = {"relu", "relu6", "hardtanh", "selu", "prelu", "rrelu"}
    assert calls_kinks(problem) == (name in by_name)


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_networks_have_none(spec, name):
    assert not has_kinks(posed(spec, Network(SMOOTH[name])))


def test_pooling_that_asks_for_indices_is_told_by_its_numbers(spec):
    pooled = nn.MaxPool2d(2, return_indices=True)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), Pooled(pooled), nn.Flatten(), nn.Linear(36, 4))
    problem = posed(spec, network)
    assert not calls_kinks(problem) and has_kinks(problem)


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x)[0]


def test_passes_that_do_not_fit_into_the_budget_are_not_begun(spec):
    smooth = posed(spec, Network(torch.tanh))
    assert not is_rough(smooth, Budget.of(1000.0))
    with pytest.raises(BudgetExhausted, match=r"the test for kinks takes about .* and 0 are left"):
        has_kinks(smooth, Budget.of(0.0))
    assert has_kinks(posed(spec, Network(F.relu)), Budget.of(0.0))  # its name tells
