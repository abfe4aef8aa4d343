import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relu_spellings import SPELLINGS
from torch.nn import functional as F

from flwr_leakage.attacks.network.blur import SmoothedRelu, smoothed_relu


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), sharpness=st.floats(0.1, 100))
def test_value_and_first_derivative_are_those_of_relu(seed, sharpness):
    inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    weights = torch.arange(35.0).reshape(7, 5)
    expected = torch.autograd.grad((weights * F.relu(inputs)).sum(), inputs)[0]
    outputs = smoothed_relu(inputs, sharpness)
    assert torch.equal(outputs, F.relu(inputs))
    assert torch.equal(torch.autograd.grad((weights * outputs).sum(), inputs)[0], expected)


def test_second_derivative_is_the_slope_of_a_sigmoid():
    inputs = torch.linspace(-2, 2, 9, dtype=torch.float64)
    errors = torch.arange(1.0, 10, dtype=torch.float64)
    outer = torch.linspace(3, -1, 9, dtype=torch.float64)

    def pulled(z, e):
        return torch.func.vjp(lambda v: smoothed_relu(v, 5.0), z)[1](e)[0]

    to_inputs, to_errors = torch.func.vjp(pulled, inputs, errors)[1](outer)
    sigmoid = torch.sigmoid(5 * inputs)
    torch.testing.assert_close(to_inputs, outer * errors * 5 * sigmoid * (1 - sigmoid))
    torch.testing.assert_close(to_errors, outer * (inputs > 0))


@pytest.mark.parametrize(
    "apply", [*(SPELLINGS[s] for s in SPELLINGS if "place" not in s), lambda z: F.relu(input=z)]
)
def test_the_context_catches_every_relu_and_nothing_after_it(apply):
    inputs = torch.tensor([[0.3, -100.0]], requires_grad=True)  # a mask of numbers needs a zero

    def curvature():
        first = torch.autograd.grad(apply(inputs).square().sum(), inputs, create_graph=True)[0]
        return float(torch.autograd.grad(first.sum(), inputs)[0][0, 0])

    plain = curvature()
    with SmoothedRelu(4.0):
        smoothed = curvature()
    assert plain == pytest.approx(2.0)
    sigmoid = torch.sigmoid(torch.tensor(1.2))
    assert smoothed == pytest.approx(2 + 0.6 * float(4 * sigmoid * (1 - sigmoid)))
    assert curvature() == plain


def test_batched_equals_one_by_one():
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))

    def distance(x):
        gradient = torch.func.grad(lambda w: F.relu(w @ x).square().sum())(weight)
        return gradient.square().sum()

    with SmoothedRelu(10.0):
        together = torch.func.vmap(torch.func.grad(distance))(inputs)
        singly = torch.stack([torch.func.grad(distance)(x) for x in inputs])
    torch.testing.assert_close(together, singly, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, torch.func.vmap(torch.func.grad(distance))(inputs))


def test_the_sharpness_must_be_positive():
    with pytest.raises(ValueError, match="sharpness must be positive, got 0"):
        SmoothedRelu(0)
