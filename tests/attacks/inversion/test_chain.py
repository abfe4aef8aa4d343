"""Products with the Jacobian of a chain's gradients, beside those of autograd."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.inversion.chain import Chain, ChainLinearization, MatrixLayer, Top
from flwr_leakage.attacks.network.blur import blurring
from flwr_leakage.attacks.solve.linearization import Linearization

SHAPE = (2, 7, 6)


def plain():
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Conv2d(3, 4, (3, 2), padding=(2, 1), dilation=(2, 1), bias=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4 * 4 * 4, 5)),
    )


class Functional(nn.Module):
    """ReLUs in place and by clamp, reshaping by view, a ReLU at the end, a strided first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 2, stride=3), nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.first(x), inplace=True)
        return self.second(x.view(len(x), -1)).clamp(min=0)


class Pooled(nn.Module):
    """As tutorials write it, pooling before a ReLU and behind it, windows that overlap, a mean."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2, padding=1)
        self.pool, self.third = nn.MaxPool2d(2, stride=1), nn.Linear(4 * 3, 5)

    def forward(self, x):
        x = self.pool(F.relu(self.first(x)))
        x = F.relu(F.max_pool2d(self.second(x), 2))
        return self.third(F.avg_pool2d(x, (1, 2)).reshape(len(x), -1))


class Smooth(nn.Module):
    """Activations without kinks, and a pooling that is neither the largest value nor the mean."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 2), nn.Linear(18, 5)

    def forward(self, x):
        x = F.lp_pool2d(F.softplus(self.first(x)), 3, 2)
        return F.leaky_relu(self.second(F.gelu(x).flatten(1)), 0.2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x = torch.relu(self.first(x))
        return x + self.second(x)


def seen(model, names=None, batch=2):
    """The chain of a model, its parameters, and images."""
    torch.manual_seed(0)
    model = model().eval()
    images = torch.randn(batch, *SHAPE)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def forward(x, given=params):
        return torch.func.functional_call(model, given, x).flatten(1)

    chain = Chain.of(forward, params, names or list(params), images)
    return chain, params, forward, images


@pytest.mark.parametrize("model", [plain, Functional, Pooled, Smooth])
@pytest.mark.parametrize("names", [None, ["0.weight", "6.bias"]])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("blur", [0.0, 0.5])
def test_values_and_products_are_those_of_autograd(model, names, batch, blur):
    if names and model is not plain:
        names = ["second.weight", "first.bias"]
    chain, params, forward, images = seen(model, names, batch)
    kinks = [step for step in chain.steps if not isinstance(step, MatrixLayer) and step.has_kinks]
    widths = [torch.rand(batch, *step.shape) + 0.1 for step in kinks]
    if widths[0].ndim == 4:
        widths[0] = widths[0].mean((0, 2, 3), keepdim=True)  # one for each channel
    errors = torch.randn(forward(images).shape)

    def gradient(x):
        leaves = {name: params[name].clone().requires_grad_() for name in chain.names}
        with blurring(widths, blur):
            outputs = forward(x, {**params, **leaves})
        functional = 0.5 * (errors * outputs.square()).sum()
        found = torch.autograd.grad(functional, list(leaves.values()), create_graph=True)
        return torch.cat([*(each.flatten() for each in found), outputs.flatten()])

    def top(outputs):
        weights = errors.T
        return Top(outputs, torch.ones_like(outputs), weights * outputs, weights)

    expected = Linearization(gradient, images)
    blurs = [blur * width for width in widths] if blur else []
    found = ChainLinearization(chain, params, blurs, top, images)
    torch.testing.assert_close(found.value, expected.value)
    direction, dual = torch.randn_like(images), torch.randn_like(expected.value)
    torch.testing.assert_close(found.push(direction), expected.push(direction))
    torch.testing.assert_close(found.pull(dual), expected.pull(dual))
    assert found.products == expected.products == 2


@pytest.mark.parametrize(
    "model",
    [
        Residual,
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1)),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3)),
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 2, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Threshold(0.1, 0.0)),
        lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
    ],
)
def test_what_is_more_than_a_chain_is_none(model):
    assert seen(model)[0] is None


def test_layers_of_large_maps_are_left_to_autograd(monkeypatch):
    assert seen(plain)[0] is not None
    entries = 2 * 9 * 4 * 3  # of the first layer, the second one has 3 · 6 · 16
    monkeypatch.setattr("flwr_leakage.attacks.inversion.chain.MOST_PATCH_ENTRIES", entries)
    assert seen(plain)[0] is None


def test_a_chain_has_every_wanted_parameter_once():
    model = plain().eval()
    model[6].weight.data.fill_(0.1)
    tied = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()) * 2)
    assert seen(lambda: tied)[0] is None
    params = {name: value.detach() for name, value in model.named_parameters()}
    other = {**params, "behind": torch.zeros(2)}

    def forward(x):
        return torch.func.functional_call(model, params, x)

    images = torch.randn(2, *SHAPE)
    assert Chain.of(forward, other, list(params), images) is not None
    assert Chain.of(forward, other, list(other), images) is None
