import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.inversion.factored import GradientProducts, UnsupportedError
from flwr_leakage.attacks.inversion.factored_layers import multiply
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, ResNet8
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch


def settled(network, seed=0):
    """Float64, with BatchNorm parameters and statistics that are not those of a start."""
    torch.manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(value, 0.5, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return GradientMap(network.double())


@pytest.fixture(
    params=[
        lambda: ResNet8((3, 12, 12), 4, width=3),
        lambda: ConvNet((3, 12, 12), 4, 3, (1, 2, 2), (1, 2, 1), (3,)),
    ],
    ids=["residual", "pooling"],
)
def network(request):
    torch.manual_seed(1)
    return settled(request.param())


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 12, 12, generator=generator, dtype=torch.float64)


def observe(network, count, batch_size=1):
    labels = torch.stack([torch.arange(i, i + batch_size) % 4 for i in range(count)])
    pieces = images(count * batch_size, 7).split(batch_size)
    gradients = [
        network(network.params, Batch(*pair), network.buffers)
        for pair in zip(pieces, labels, strict=True)
    ]
    return labels, [{k: v.detach() for k, v in g.items()} for g in gradients]


def cosine(inner, squared):
    return (1 - inner / squared.sqrt()).sum()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_products_and_their_derivative_are_those_of_the_gradients(network, together, batch_size):
    labels, observed = observe(network, 2, batch_size)
    products = GradientProducts(network, network.params, network.buffers, observed, together)
    inputs = images(2 * batch_size).requires_grad_()
    inner, squared = products(inputs, labels, [0, 1])
    (derivative,) = torch.autograd.grad(cosine(inner, squared), inputs)

    def direct(x):
        pairs = zip(x.split(batch_size), labels, strict=True)
        flat = [ravel(network(network.params, Batch(*p), network.buffers)) for p in pairs]
        pairs = list(zip(flat, map(ravel, observed), strict=True))
        return (
            torch.stack([g @ o for g, o in pairs]),
            torch.stack([g @ g for g, _ in pairs]),
        )

    expected = direct(inputs.detach())
    torch.testing.assert_close((inner, squared), expected, rtol=1e-9, atol=1e-12)
    norms = torch.stack([ravel(target).square().sum() for target in observed])
    torch.testing.assert_close(products.observed_squared, norms)
    reference = torch.func.grad(lambda x: cosine(*direct(x)))(inputs.detach())
    torch.testing.assert_close(derivative, reference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("together", [False, True])
def test_targets_together_equal_one_by_one_and_any_may_be_left_out(network, together):
    labels, observed = observe(network, 3)
    products = GradientProducts(network, network.params, network.buffers, observed, together)
    inputs = images(3).requires_grad_()
    every = products(inputs, labels, [0, 1, 2])
    for chosen in ([2], [0], [2, 0]):
        some = products(inputs.detach()[chosen].requires_grad_(), labels[chosen], chosen)
        torch.testing.assert_close(some, tuple(value[chosen] for value in every))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.fc(x)))


@pytest.mark.parametrize(
    "network",
    [
        Twice(),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    ],
    ids=["used twice", "another layer", "batch statistics"],
)
def test_what_is_not_covered_is_refused(network):
    mapping = GradientMap(network, batch_norm="batch")
    observed = [{k: torch.ones_like(v) for k, v in mapping.params.items()}]
    products = GradientProducts(mapping, mapping.params, mapping.buffers, observed)
    with pytest.raises(UnsupportedError):
        products(torch.randn(2, 4, requires_grad=True), torch.tensor([[0, 1]]), [0])


def test_multiply_is_a_product_of_matrices():
    rows, weight = torch.randn(3, 5), torch.randn(4, 5)
    torch.testing.assert_close(multiply(rows, weight), F.linear(rows, weight))
    torch.testing.assert_close(multiply(rows.double(), weight.double()).float(), rows @ weight.T)
