from collections import OrderedDict

import pytest
import torch
from attacked import observe
from relu_spellings import SPELLINGS
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, FeatureMatching, pose
from flwr_leakage.attacks.exact.chain import IDENTITY, RELU, features_of, trace_chain
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def chain_of(*layers):
    network = nn.Sequential(*layers)
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, -1.5, -0.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    gradient_map = GradientMap(network)
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    observation = observe(gradient_map, Batch(image, torch.tensor([2])), LocalSchedule(1.0))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    logits = gradient_map.logits(problem.params, image.double(), problem.buffers)
    return trace_chain(problem), image.double(), logits, problem


def test_two_batch_norms_in_a_row_are_folded_into_one():
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3, 2, bias=False)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=True)
    chain, image, logits, _ = chain_of(conv, *norms, nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 4))
    torch.testing.assert_close(features_of(chain, image), logits)
    assert chain[-1].activation is IDENTITY


def test_links_own_the_gradients_of_their_parameters():
    torch.manual_seed(0)
    chain, image, _, problem = chain_of(
        nn.Conv2d(1, 4, 3, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(36, 4),
    )
    first, last = chain
    assert torch.equal(first.weight_gradient, problem.gradient["0.weight"])
    assert torch.equal(last.bias_gradient, problem.gradient["4.bias"])
    errors = last.pull_back(last.bias_gradient[None]).reshape(1, 4, 3, 3)
    errors = errors * first.activation.slope(first.outputs(image)) * first.scale.reshape(-1, 1, 1)
    torch.testing.assert_close(errors.sum((0, 2, 3)), first.bias_gradient, rtol=0, atol=1e-7)
    patches = first.patches(image)
    torch.testing.assert_close(
        errors[0].flatten(1) @ patches.T, first.weight_gradient.flatten(1), rtol=0, atol=1e-6
    )


def test_tracing_draws_nothing_from_the_shared_random_stream():
    torch.manual_seed(0)
    chain, _, _, problem = chain_of(nn.Flatten(), nn.Linear(64, 4))
    before = torch.get_rng_state()
    trace_chain(problem)
    assert torch.equal(torch.get_rng_state(), before)
    assert chain[0].geometry is None


class Modules(nn.Module):
    """A ReLU ConvNet of which every style below is another spelling."""

    def __init__(self, padding=1):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(1, 6, 3, padding=padding)
        self.b = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.c, self.d = nn.Linear(128, 16), nn.Linear(16, 4)
        self.relu, self.flat, self.drop = nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)

    def forward(self, x):
        x = self.relu(self.b(self.relu(self.a(x))))
        return self.d(self.drop(self.relu(self.c(self.flat(x)))))


class Functional(Modules):
    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(x), inplace=True)))
        return self.d(F.relu(self.c(x.view(x.size(0), -1))))


class Methods(Modules):
    def forward(self, x):
        x = self.b(self.a(x).relu()).relu().reshape(len(x), 128)
        return self.d(torch.relu(self.c(x)))


class Same(Modules):
    def __init__(self):
        super().__init__(padding="same")

    def forward(self, x):
        x = torch.relu(self.b(self.a(x).relu()))
        return self.d(F.dropout(self.c(torch.flatten(x, 1)).relu(), training=self.training))


class Bare(Modules):
    def forward(self, x):
        x = F.relu(F.conv2d(x, self.a.weight, self.a.bias, padding=1))
        x = F.relu(F.conv2d(x, self.b.weight, self.b.bias, 2, 1))
        x = F.relu(F.linear(x.flatten(1), self.c.weight, self.c.bias))
        return torch.addmm(self.d.bias, x, self.d.weight.t())


class Products(Modules):
    def forward(self, x):
        x = nn.Sequential(self.a, self.relu, self.b, self.relu, self.flat)(x)
        return self.d(F.relu(x @ self.c.weight.T + self.c.bias))


class Statements(Modules):
    """In place, with what the calls return left unused."""

    def forward(self, x):
        x = self.a(x)
        F.relu_(x)
        x = self.b(x)
        x.clamp_(min=0)
        x = self.c(x.view(len(x), -1))
        torch.relu_(x)
        return self.d(x)


class Padded(Modules):
    def __init__(self):
        super().__init__(padding=0)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x):
        x = F.threshold(self.a(F.pad(x, (1, 1, 1, 1))), 0, 0)
        x = torch.clamp(F.conv2d(self.pad(x), self.b.weight, self.b.bias, 2), min=0)
        return self.d(self.c(x.flatten(1)).clamp_min(0))


class Turned(nn.Module):
    """A linear layer whose weight is of shape (inputs, outputs)."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), layer.bias

    def forward(self, x):
        return x @ self.weight + self.bias


class Probabilities(Modules):
    """Log-probabilities, as the examples of PyTorch return them, and turned weights."""

    def __init__(self):
        super().__init__()
        self.d = Turned(self.d)
        self.c = Turned(self.c)

    def forward(self, x):
        return F.log_softmax(super().forward(x), dim=1)


STYLES = (Modules, Functional, Methods, Same, Bare, Products, Statements, Padded, Probabilities)


def chain_in_style(style, spec=SPEC):
    gradient_map = GradientMap(style())
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    observation = observe(gradient_map, Batch(image, torch.tensor([2])), LocalSchedule(1.0))
    job = AttackJob(gradient_map, spec, [observation], ThreatModel())
    problem = pose(gradient_map, spec, observation, ThreatModel()).to(torch.float64)
    return job, trace_chain(problem), image.double()


@pytest.mark.parametrize("style", STYLES)
def test_a_chain_is_the_same_however_it_is_written(style):
    job, chain, image = chain_in_style(style)
    _, expected, _ = chain_in_style(Modules)
    assert len(chain) == len(expected) == 4
    for found, known in zip(chain, expected, strict=True):
        assert (found.name, found.geometry) == (known.name, known.geometry)
        assert (found.input_shape, found.output_shape) == (known.input_shape, known.output_shape)
        assert found.activation is known.activation
        torch.testing.assert_close(found.weight_gradient, known.weight_gradient)
        torch.testing.assert_close(found.bias_gradient, known.bias_gradient)
    logits = job.gradient_map.logits(
        {k: v.double() for k, v in job.gradient_map.params.items()}, image
    )
    torch.testing.assert_close(features_of(chain, image).log_softmax(1), logits.log_softmax(1))


@pytest.mark.parametrize("style", STYLES[1:])
def test_the_attack_is_the_same_however_a_chain_is_written(style):
    quick = FeatureMatching(rounds=2, newton_steps=0)
    (expected,), (found,) = (quick(chain_in_style(each)[0]) for each in (Modules, style))
    torch.testing.assert_close(found.batch.inputs, expected.batch.inputs, rtol=0, atol=1e-4)


class Lambda(nn.Module):
    def __init__(self, relu):
        super().__init__()
        self.relu = relu

    def forward(self, x):
        return self.relu(x)


class Halved(Modules):
    """A ReLU of three calls."""

    def __init__(self):
        super().__init__()
        self.relu = Lambda(lambda z: (z + z.abs()) / 2)


class Capped(Modules):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU6()


def test_a_relu_of_several_calls_is_told_by_its_numbers():
    _, chain, _ = chain_in_style(Halved)
    assert [link.activation for link in chain] == [RELU, RELU, RELU, IDENTITY]


def spelled(relu):
    network = Modules()
    network.relu = Lambda(SPELLINGS[relu])
    return network


@pytest.mark.parametrize("relu", SPELLINGS)
def test_the_attack_is_the_same_however_a_relu_is_written(relu):
    quick = FeatureMatching(rounds=1, newton_steps=0)
    styles = Modules, lambda: spelled(relu)
    (expected,), (found,) = (quick(chain_in_style(each)[0]) for each in styles)
    assert torch.equal(found.batch.inputs, expected.batch.inputs)


class Pooled(Modules):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.b(F.relu(self.a(x)))), 1, 1) * 2
        return self.d(F.relu(self.c(x.flatten(1))))


class PooledModule(nn.Sequential):
    def __init__(self):
        layers = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        super().__init__(OrderedDict(a=layers[0], b=layers[1], c=layers[2], e=layers[3]))
        self.add_module("d", nn.Linear(54, 4))


class Twice(Modules):
    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(F.relu(self.a(x))[:, :1] * 0 + x))))
        return self.d(F.relu(self.c(x.flatten(1))))


class Mirrored(Modules):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 6, 3, padding=1, padding_mode="reflect")


class Frozen(Modules):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.first(F.relu(self.first(x.flatten(1)))))
        return self.last(x)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(F.relu(self.first(x[:, 0])).flatten(1))


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (Pooled, r"'c' does not take .*: mul \(test_chain.py:\d+\)"),
        (Mirrored, r"'a' does not take .*: pad \(test_chain.py:\d+\)"),
        (PooledModule, r"'d' does not take .*: max_pool2d \(of MaxPool2d\)"),
        (Capped, r"'b' does not take .*: hardtanh \(test_chain.py:\d+\)"),
        (Twice, "'a' does not take"),
        (Frozen, "'a' is frozen: its gradient is not in the update"),
        (Tied, "'first' cannot be part of a chain, as it is used twice"),
        (Tokens, "'first' must take one vector of a sample, got several"),
    ],
)
def test_what_is_no_chain_is_named(style, said):
    with pytest.raises(ValueError, match=said):
        chain_in_style(style)
