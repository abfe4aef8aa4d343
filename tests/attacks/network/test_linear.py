import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.network.linear import find_first_layer, logits_behind, traced
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)

SPEC = InputSpec((1, 4, 4), 3)


class Modules(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.b(self.drop(F.relu(self.a(x.flatten(1)))))


class Functional(Modules):
    def forward(self, x):
        hidden = F.linear(x.reshape(len(x), -1), self.a.weight, self.a.bias).relu()
        return F.linear(input=hidden, weight=self.b.weight, bias=self.b.bias)


class Products(Modules):
    def forward(self, x):
        hidden = torch.relu(x.view(len(x), -1) @ self.a.weight.T + self.a.bias)
        return self.b.bias + torch.mm(hidden, self.b.weight.t())


class InPlace(Modules):
    def forward(self, x):
        hidden = torch.matmul(x.flatten(1), self.a.weight.transpose(0, 1))
        hidden += self.a.bias
        return torch.addmm(self.b.bias, hidden.clamp(min=0), self.b.weight.mT)


class Einsum(Modules):
    def forward(self, x):
        hidden = torch.einsum("bi, oi -> bo", x.flatten(1), self.a.weight) + self.a.bias
        return torch.einsum("nf,kf->nk", hidden.relu(), self.b.weight) + self.b.bias


STYLES = (Modules, Functional, Products, InPlace, Einsum)


class Turned(nn.Module):
    """The same layers with weights of shape (inputs, outputs)."""

    def __init__(self, spelling):
        super().__init__()
        self.weight_a, self.bias_a = nn.Parameter(torch.zeros(16, 8)), nn.Parameter(torch.zeros(8))
        self.weight_b, self.bias_b = nn.Parameter(torch.zeros(8, 3)), nn.Parameter(torch.zeros(3))
        self.spelling = spelling

    def linear(self, x, weight, bias):
        if self.spelling == "addmm":
            return torch.addmm(bias, x, weight)
        if self.spelling == "einsum":
            return torch.einsum("bi,io->bo", x, weight) + bias
        return x @ weight + bias

    def forward(self, x):
        hidden = self.linear(x.flatten(1), self.weight_a, self.bias_a).relu()
        return self.linear(hidden, self.weight_b, self.bias_b)


def posed(network):
    gradient_map = GradientMap(network.eval())
    params = gradient_map.params
    batch = Batch(torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    delta = {name: -value for name, value in gradient_map(params, batch).items()}
    update = Update(delta, {}, LocalSchedule(1.0, batch_size=2), 2)
    return pose(gradient_map, SPEC, Observation(1, 0, params, {}, update), ThreatModel())


@pytest.mark.parametrize("style", STYLES)
def test_every_spelling_of_a_layer_is_the_same_layer(style):
    torch.manual_seed(0)
    reference = Modules().eval()
    network = style()
    network.load_state_dict(reference.state_dict())
    inputs = torch.randn(3, 1, 4, 4)
    uses = traced(posed(network), inputs).linear
    assert [(u.weight, u.bias) for u in uses] == [
        ("a.weight", "a.bias"),
        ("b.weight", "b.bias"),
    ]
    hidden = reference.a(inputs.flatten(1))
    torch.testing.assert_close(uses[0].inputs, inputs.flatten(1))
    torch.testing.assert_close(uses[0].outputs, hidden)
    torch.testing.assert_close(uses[1].inputs, hidden.relu())


@pytest.mark.parametrize("spelling", ["@", "addmm", "einsum"])
def test_weights_of_the_other_order_are_posed_as_their_transposes(spelling):
    torch.manual_seed(0)
    reference, network = Modules().eval(), Turned(spelling)
    own = {k: v.T if v.ndim == 2 else v for k, v in reference.state_dict().items()}
    names = {f"{kind}_{layer}": f"{layer}.{kind}" for layer in "ab" for kind in ("weight", "bias")}
    network.load_state_dict({name: own[names[name]] for name in names})
    torch.manual_seed(1)  # of the batch
    expected = posed(reference)
    torch.manual_seed(1)
    problem = posed(network)
    for name, other in names.items():
        torch.testing.assert_close(problem.params[name], expected.params[other])
        torch.testing.assert_close(problem.gradient[name], expected.gradient[other])
    inputs = torch.randn(3, 1, 4, 4)
    uses = traced(problem, inputs).linear
    assert [(u.weight, u.bias) for u in uses] == [("weight_a", "bias_a"), ("weight_b", "bias_b")]
    torch.testing.assert_close(uses[1].inputs, reference.a(inputs.flatten(1)).relu())


@pytest.mark.parametrize("style", STYLES)
def test_outputs_put_in_the_place_of_a_layers_own_reach_the_logits(style):
    network = style().eval()
    outputs = torch.randn(2, 8, requires_grad=True)
    logits = logits_behind(posed(network), "a.weight", outputs)
    torch.testing.assert_close(logits, network.b(outputs.relu()))
    assert torch.autograd.grad(logits.sum(), outputs)[0].any()


class Gated(Modules):
    """A network in which a second linear layer takes the image by a path of its own."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 8)

    def forward(self, x):
        return self.b(self.gate(x.flatten(1)).sigmoid() * F.relu(self.a(x.flatten(1))))


@pytest.mark.parametrize(("network", "first"), [(Modules(), "a.weight"), (Gated(), "b.weight")])
def test_the_first_layer_is_one_that_alone_passes_the_image_on(network, first):
    assert find_first_layer(posed(network)).weight == first


def test_a_network_without_a_bias_in_a_linear_layer_is_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
    with pytest.raises(ValueError, match="must have a bias"):
        find_first_layer(posed(network))
