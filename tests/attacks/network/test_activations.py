import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.network import activations
from flwr_leakage.attacks.network.activations import READERS, Activation, leaky_relu
from flwr_leakage.attacks.network.blur import blurred, blurred_parts
from flwr_leakage.attacks.network.calls import read_call, reads
from flwr_leakage.attacks.network.trace import Trace

ENTRIES = [
    activations.RELU,
    leaky_relu(0.2),
    activations.elu(0.7),
    activations.celu(0.7),
    activations.softplus(2.0),
    activations.hardtanh(-0.5, 2.0),
    activations.gelu("tanh"),
    *(
        make()
        for name, make in inspect.getmembers(activations, inspect.isfunction)
        if inspect.signature(make).return_annotation is Activation and name != "leaky_relu"
    ),
]
Z = torch.linspace(-8, 8, 4001, dtype=torch.float64)[1::2]  # away from kinks at whole numbers


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.name)
def entry(request):
    return request.param


def test_slope_and_inverse_follow_from_the_outputs(entry):
    if entry.inverse is None:
        with pytest.raises(AssertionError):
            entry.target(Z)
        return
    z = Z.clone().requires_grad_()
    a = entry.function(z)
    (slope,) = torch.autograd.grad(a.sum(), z)
    a = a.detach()
    torch.testing.assert_close(entry.slope(a), slope, rtol=1e-7, atol=1e-9)
    known = entry.invertible(a)
    torch.testing.assert_close(entry.target(a)[known], Z[known], rtol=1e-5, atol=1e-6)
    assert bool(entry.binds(Z + 1e-3, a)[known].all())
    inner = (Z - torch.tensor(entry.ends)[:, None]).abs().amin(0) < 1e-3
    assert not bool(entry.binds(Z, a)[~known & ~inner].any())
    assert bool((a >= entry.low).all() and (a <= entry.high).all())


def test_its_kinks_are_where_its_slope_jumps(entry):
    for place, jump in entry.kinks:
        sides = torch.tensor([place - 1e-7, place + 1e-7], dtype=torch.float64).requires_grad_()
        below, above = torch.autograd.grad(entry.function(sides).sum(), sides)[0]
        assert float(above - below) == pytest.approx(jump, abs=1e-5)
    places = torch.tensor([float(place) for place, _ in entry.kinks] or [100.0])
    away = Z[(Z[:, None] - places).abs().amin(1) > 0.01]
    slopes = [
        torch.autograd.grad(entry.function(z).sum(), z)[0]
        for z in ((away - 1e-6).requires_grad_(), (away + 1e-6).requires_grad_())
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-4)


def test_blurred_it_is_the_mean_over_noise_of_its_kinks(entry):
    width = torch.tensor(0.3, dtype=torch.float64)
    value = blurred(entry, Z, width)
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    noise = width * torch.special.ndtri(uniform)
    expected = entry.function(Z)
    for place, jump in entry.kinks:
        mean = (Z[:, None] - place + noise).clamp_min(0).mean(1)
        expected = expected + jump * (mean - (Z - place).clamp_min(0))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-3)
    parts = blurred_parts(entry, Z, width)
    torch.testing.assert_close(parts[0], value)
    z = Z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(blurred(entry, z, width).sum(), z, create_graph=True)
    torch.testing.assert_close(parts[1], slope)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    torch.testing.assert_close(parts[2], curvature)


MODULES = [
    *(nn.Sigmoid(), nn.Tanh(), nn.Softsign(), nn.ELU(0.7), nn.CELU(0.7), nn.SELU(), nn.ReLU6()),
    *(nn.Softplus(2.0), nn.LogSigmoid(), nn.Hardsigmoid(), nn.Hardtanh(-0.5, 2.0)),
    *(nn.Hardswish(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.LeakyReLU(0.2)),
    *(nn.ELU(0.7, inplace=True), nn.CELU(0.7, inplace=True), nn.Hardtanh(-0.5, 2.0, True)),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_is_read_as_the_function_that_it_computes(module):
    trace = Trace.of(lambda: module(Z.clone()))
    (step,) = trace.steps
    torch.testing.assert_close(step.inputs, Z)
    torch.testing.assert_close(step.op.activation.function(Z), module(Z.clone()))
    assert step.op.in_place == getattr(module, "inplace", False)


def test_every_function_of_an_entry_is_read():
    entries = [each for each, read in READERS.items() if "_reader" in repr(read)]
    assert len(entries) == 30  # the others are spellings of a ReLU; see test_relus.py
    for function in entries:
        z = torch.randn(3)
        op = read_call(function, (z,), {})
        torch.testing.assert_close(op.activation.function(z.clone()), function(z.clone()))


def test_a_call_with_settings_that_no_entry_knows_is_not_read():
    assert read_call(F.gelu, (Z,), {"approximates": "tanh"}) is None


def test_what_torch_does_not_dispatch_is_refused_when_it_is_registered():
    def squareplus(input):
        return (input + (input.square() + 4).sqrt()) / 2

    register = activations.entry(squareplus)
    with pytest.raises(ValueError, match="does not dispatch squareplus"):
        register(activations.tanh)
    with pytest.raises(ValueError, match="does not dispatch squareplus"):
        reads(squareplus)


@pytest.mark.parametrize("wrong", ["slope", "inverse"])
def test_an_entry_that_contradicts_its_function_is_refused(wrong):
    broken = replace(activations.tanh(), **{wrong: lambda a: a + 0.5})
    with pytest.raises(ValueError, match=f"the {wrong} of tanh contradicts its function"):
        activations.entry()(lambda: broken)


def test_an_own_function_that_torch_dispatches_is_known_to_readers(monkeypatch):
    @torch.overrides.wrap_torch_function(lambda input: (input,))
    def squareplus(input):
        return (input + (input.square() + 4).sqrt()) / 2

    monkeypatch.setattr(activations, "READERS", dict(READERS))

    @activations.entry(squareplus)
    def entry() -> Activation:
        return Activation(
            "squareplus", squareplus, lambda a: a.square() / (a.square() + 1), lambda a: a - 1 / a
        )

    assert squareplus in activations.READERS
    monkeypatch.setitem(READERS, squareplus, activations.READERS[squareplus])
    (step,) = Trace.of(lambda: squareplus(Z)).steps
    assert step.op.activation.name == "squareplus"
