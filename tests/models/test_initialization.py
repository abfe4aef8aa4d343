import math

import pytest
import torch
from torch import nn

from flwr_leakage.models import LeNet, ResNet8, initialize
from flwr_leakage.randomness import make_generator

SCHEMES = ["default", "uniform", "normal", "normal_variance", "kaiming", "xavier"]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_generator_same_weights_whatever_the_global_state(scheme):
    torch.manual_seed(1)
    first = initialize(ResNet8((3, 16, 16), 10, width=4), scheme, make_generator(5))
    torch.manual_seed(2)
    second = initialize(ResNet8((3, 16, 16), 10, width=4), scheme, make_generator(5))
    other = initialize(ResNet8((3, 16, 16), 10, width=4), scheme, make_generator(6))
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_global_generator_is_left_alone(scheme):
    model = LeNet((1, 28, 28), 10)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    initialize(model, scheme, make_generator(0))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("scheme", "std", "bound"),
    [
        ("uniform", 1 / math.sqrt(12), 0.5),
        ("normal", 0.5, math.inf),
        ("normal_variance", 0.5**0.5, math.inf),
        ("kaiming", math.sqrt(2 / 1000), math.inf),
        ("xavier", math.sqrt(2 / 1400), math.sqrt(6 / 1400)),
        # torch's own nn.Linear: U(±1/√fan_in).
        ("default", 1 / math.sqrt(3000), 1 / math.sqrt(1000)),
    ],
)
def test_weights_have_the_scheme_s_moments(scheme, std, bound):
    layer = initialize(nn.Linear(1000, 400), scheme, make_generator(0))
    weight = layer.weight.detach()
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel())
    assert weight.abs().max() <= bound
    assert (layer.bias == 0).all() == (scheme in ("kaiming", "xavier"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_norm_starts_as_the_identity(scheme):
    model = ResNet8((3, 16, 16), 10, width=4)
    with torch.no_grad():
        model.bn1.weight.fill_(7.0)
        model.bn1.running_mean.fill_(7.0)
    initialize(model, scheme, make_generator(0))
    assert (model.bn1.weight == 1).all() and (model.bn1.bias == 0).all()
    assert (model.bn1.running_mean == 0).all() and (model.bn1.running_var == 1).all()


def test_unknown_scheme_and_unreachable_parameters_are_named():
    with pytest.raises(ValueError, match=r"initialization must be one of .*'orthogonal'"):
        # beartype guards the annotation; the undecorated function guards configs.
        getattr(initialize, "__wrapped__", initialize)(
            nn.Linear(2, 2), "orthogonal", make_generator(0)
        )

    class WithToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))

    with pytest.raises(ValueError, match=r"got \['token'\] in the model \(WithToken\)"):
        initialize(WithToken(), "default", make_generator(0))
