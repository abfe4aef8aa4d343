import pytest
import torch
from relu_spellings import SPELLINGS
from torch.nn import functional as F

from flwr_leakage.attacks.network.activations import RELU
from flwr_leakage.attacks.network.calls import read_call
from flwr_leakage.function_mode import FunctionMode


class Calls(FunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_call(self, function, args, kwargs):
        call = read_call(function, args, kwargs)
        if call is not None:
            self.found.append((call, call.inputs.detach().clone()))
        return function(*args, **kwargs)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def calls_of(function, *inputs):
    with Calls() as calls:
        outputs = function(*inputs)
    return calls.found, outputs


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_relu(spelling):
    z = draw(2, 3, 4)
    ((call, inputs),), outputs = calls_of(SPELLINGS[spelling], z.clone())
    torch.testing.assert_close(outputs, F.relu(z))
    torch.testing.assert_close(inputs, z)
    assert call.activation is RELU
    assert call.in_place == ("in place" in spelling)


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s != "rrelu"])
def test_it_is_told_within_derivatives_of_batches(spelling):
    """PyTorch has no rule for a batch of ``rrelu``."""

    def gradient(weight, z):
        return torch.func.grad(lambda w: SPELLINGS[spelling](w * z).square().sum())(weight)

    def columns(z):
        ones = torch.eye(z.numel()).reshape(-1, *z.shape)
        along = torch.func.vmap(
            lambda v: torch.func.jvp(lambda x: gradient(torch.ones(()), x), (z,), (v,))[1]
        )
        return along(ones)

    found, derivative = calls_of(columns, draw(2, 3))
    assert len(found) == 1
    torch.testing.assert_close(derivative, 4 * F.relu(draw(2, 3)).flatten())


OTHERS = {
    "a maximum of two": lambda z, y: torch.max(z, y),
    "of one": lambda z, y: torch.max(z),
    "along an axis": lambda z, y: torch.max(z, 1),
    "into another shape": lambda z, y: torch.maximum(z[:, :1], torch.zeros_like(z)),
    "into another type": lambda z, y: torch.maximum(z, torch.zeros(1, dtype=torch.float64)),
    "another condition": lambda z, y: torch.where(y > 0, z, 0.0),
    "another value": lambda z, y: torch.where(z > 0, z, 0.1 * z),
    "places": lambda z, y: torch.where(z > 0),
    "the other half": lambda z, y: torch.where(z > 0, 0.0, z),
    "a filled mask": lambda z, y: z.masked_fill(y > 0, 0.0),
    "a mask of ones": lambda z, y: z.square() * torch.ones_like(z),
    "a mask that keeps all of a ReLU": lambda z, y: torch.where(z.abs() >= 0, (z > 0) + z * 0, 0.0),
    "another mask": lambda z, y: z * (y > 0),
    "a product": lambda z, y: z * y,
    "a factor": lambda z, y: 2 * z,
    "a leaky one": lambda z, y: F.leaky_relu(z),
    "a randomised one": lambda z, y: F.rrelu(z),
    "bounded": lambda z, y: F.relu6(z.clamp(0, 6)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is_a_relu(name):
    z = draw(4, 5)
    found, _ = calls_of(OTHERS[name], z, z.flip(0))
    assert not any(call.activation.is_relu for call, _ in found)


def test_a_slope_that_is_trained_stays_a_parameter():
    weight = torch.zeros(1, requires_grad=True)
    ((call, _),), _ = calls_of(F.prelu, draw(3, 2), weight)
    assert not call.activation.is_relu
    outputs = call.activation.function(torch.tensor([-1.0]))
    (slope,) = torch.autograd.grad(outputs.sum(), weight)
    assert float(slope) == -1


@pytest.mark.parametrize(
    "leaky",
    [
        lambda z: F.leaky_relu(z, 0.2),
        lambda z: F.leaky_relu_(z, negative_slope=0.2),
        lambda z: F.rrelu(z, 0.1, 0.3),
        lambda z: F.prelu(z, torch.tensor([0.2, 0.2])),
    ],
)
def test_a_leaky_relu_is_told_with_its_slope(leaky):
    z = draw(3, 2, 4)
    ((call, inputs),), outputs = calls_of(leaky, z.clone())
    torch.testing.assert_close(outputs, torch.where(z > 0, z, 0.2 * z))
    torch.testing.assert_close(call.activation.function(z), outputs)
    torch.testing.assert_close(inputs, z)
