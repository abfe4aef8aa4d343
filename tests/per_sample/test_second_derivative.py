"""The finite-difference check of second derivatives: faults are found, and nothing else."""

import pytest
import torch
from layers import (
    Assigning,
    Attention,
    Branching,
    Detached,
    OldStyle,
    OnceDifferentiable,
    Recurrent,
)
from layers import with_activation as network_with
from torch import nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.per_sample import differentiable, separate
from flwr_leakage.per_sample.second_derivative import check_second_derivative
from flwr_leakage.records import Batch


def sample(network, inputs=None, batch_norm="running", loss=F.cross_entropy):
    gradient_map = GradientMap(network, loss, batch_norm)
    params, buffers = gradient_map.params, gradient_map.buffers
    if inputs is None:
        inputs = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    batch = Batch(inputs, torch.arange(len(inputs)) % 4)
    gradient_map = differentiable(gradient_map, params, buffers, batch)
    weights = torch.ones(len(inputs))
    return separate(gradient_map, params, buffers, batch, weights, torch.float64)[[0]]


@pytest.mark.parametrize("function", [OnceDifferentiable.apply, Detached.apply])
def test_a_backward_that_cannot_be_differentiated_is_found(function):
    found = check_second_derivative(sample(network_with(function)))
    assert "not that of its gradient" in found.fault and not found.one_by_one


class Slightly(torch.autograd.Function):
    """Tanh whose second derivative is 1 % off."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        slope = 1 - torch.tanh(x) ** 2
        return gradient * (slope.detach() + 0.99 * (slope - slope.detach()))


def test_a_second_derivative_that_is_off_by_a_hundredth_is_found():
    assert check_second_derivative(sample(network_with(Slightly.apply))).fault
    assert not check_second_derivative(sample(network_with(torch.tanh))).fault


def test_a_straight_through_estimator_is_found():
    def rounded(x):
        return x + ((4 * x).round() / 4 - x).detach()

    assert check_second_derivative(sample(network_with(rounded))).fault


FIELD = {
    "relu": (nn.ReLU,),
    "leaky": (nn.LeakyReLU,),
    "sigmoid": (nn.Sigmoid,),
    "tanh": (nn.Tanh,),
    "gelu": (nn.GELU,),
    "silu": (nn.SiLU,),
    "softplus": (nn.Softplus,),
    "elu": (nn.ELU,),
    "hardswish": (nn.Hardswish,),
    "hardsigmoid": (nn.Hardsigmoid,),
    "relu6": (nn.ReLU6,),
    "max pool": (nn.ReLU, lambda: nn.MaxPool2d(2)),
    "average pool": (nn.Sigmoid, lambda: nn.AvgPool2d(2)),
    "batch norm": (lambda: nn.BatchNorm2d(4), nn.ReLU),
    "group norm": (lambda: nn.GroupNorm(2, 4), nn.ReLU),
    "layer norm": (lambda: nn.LayerNorm([4, 6, 6]), nn.GELU),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), nn.Sigmoid),
}


def random_network(kind, seed):
    torch.manual_seed(seed)
    layers = [make() for make in FIELD[kind]]
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, 1, 1), *layers, nn.Flatten(), nn.LazyLinear(16), nn.ReLU(),
        nn.Linear(16, 4),
    )  # fmt: skip
    network(torch.zeros(2, 1, 6, 6))
    if seed % 3 == 0:  # the large weights of attacks' papers
        for parameter in network.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return network


@pytest.mark.parametrize("kind", FIELD)
def test_sound_networks_raise_no_alarm(kind):
    for seed in range(14):
        inputs = torch.rand(2, 1, 6, 6)
        if seed % 2:  # flat regions, whose entries tie
            inputs[:, :, :3] = 0.0
        scale = 10.0 ** (seed % 5 - 2)
        mode = "batch" if seed % 4 == 1 else "running"
        found = check_second_derivative(sample(random_network(kind, seed), scale * inputs, mode))
        assert (found.fault, found.one_by_one, found.unchecked) == ("", "", ""), (kind, seed)


@pytest.mark.parametrize("kind", ["scaled_dot_product", "multihead", "encoder"])
def test_attention_has_right_second_derivatives(kind):
    found = check_second_derivative(sample(Attention(kind)))
    assert not (found.fault or found.one_by_one or found.unchecked)


@pytest.mark.parametrize(
    "network",
    [
        lambda: Recurrent(nn.GRU),
        lambda: Recurrent(nn.LSTM),
        lambda: Recurrent(nn.RNN),
        Branching,
        Assigning,
        lambda: network_with(OldStyle.apply),
    ],
    ids=["GRU", "LSTM", "RNN", "branch", "assign", "old function"],
)
def test_what_vmap_refuses_is_checked_one_by_one(network):
    one = sample(network())
    assert one.gradient_map.one_by_one
    found = check_second_derivative(one)
    assert not (found.fault or found.unchecked)


class Functional(nn.Module):
    """Layer normalisation as a function, which no layer announces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, images):
        return self.last(F.layer_norm(self.first(images.flatten(1)), [8], self.scale).tanh())


def test_where_torch_func_is_wrong_plain_autograd_takes_over():
    # vmap takes the saved mean and deviation of layer_norm for constants.
    found = check_second_derivative(sample(Functional()))
    assert not found.fault and "torch.func" in found.one_by_one


def test_a_model_that_refuses_float64_is_told_to_be_unchecked():
    class Single(Branching):
        def forward(self, images):
            return self.last(torch.sigmoid(self.first(images.flatten(1))).float())

    found = check_second_derivative(sample(Single()))
    assert not found.fault and "dtype" in found.unchecked
