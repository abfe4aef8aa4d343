"""Masks of dropout, read off the update of one sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flwr_leakage
from flwr_leakage.attacks import LBFGS, GradientInversion
from flwr_leakage.attacks.one_call import as_observation
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, InputSpec, ThreatModel

SPEC = InputSpec((1, 12, 12), 3, (0.5,), (0.25,))


def _usual():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(150, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 3)),
    )


class _OfChannels(nn.Module):
    """Whole channels before the pooling, and a function before the last layer."""

    def __init__(self):
        super().__init__()
        self.convolution, self.drop = nn.Conv2d(1, 6, 3), nn.Dropout2d(0.4)
        self.first, self.last = nn.Linear(150, 40), nn.Linear(40, 3)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.drop(self.convolution(x)), 2)).flatten(1)
        return self.last(F.dropout(F.relu(self.first(x)), 0.3, training=self.training))


def _smooth():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Dropout(0.2)),
        nn.Linear(400, 3),
    )


def _between_convolutions():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout(0.25), nn.Conv2d(6, 6, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(384, 3)),
    )


def _seen(make, is_active=True, count=1):
    torch.manual_seed(0)
    network = make().train(is_active)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    batch = Batch(torch.randn(count, *SPEC.shape), torch.arange(count) % 3)
    loss = F.cross_entropy(network(batch.inputs), batch.targets)
    return network, batch, list(torch.autograd.grad(loss, list(network.parameters())))


def _problem(network, gradient, count=1):
    gradient_map = GradientMap(network)
    seen = as_observation(gradient_map, tuple(gradient), count, None, None, 0, ())
    return pose(gradient_map, SPEC, seen, ThreatModel())


def _error(problem, batch):
    found = ravel(problem.gradient_map(problem.params, batch, problem.buffers))
    return float((found - ravel(problem.gradient)).norm() / found.norm())


@pytest.mark.parametrize(
    ("make", "told"),
    [(_usual, "2 of 2 masks"), (_OfChannels, "2 of 2 masks"), (_smooth, "1 of 1 masks")],
)
def test_active_dropout_of_one_sample_is_read_and_inactive_is_noticed(make, told):
    network, batch, gradient = _seen(make)
    problem = _problem(network, gradient)
    assert problem.masks.startswith(told)
    assert _error(problem, batch) < 1e-5
    network, batch, gradient = _seen(make, is_active=False)
    problem = _problem(network.train(), gradient)
    assert problem.masks == ""
    assert _error(problem, batch) < 1e-5


def test_masks_before_a_convolution_are_not_read_and_those_behind_are():
    network, _, gradient = _seen(_between_convolutions)
    assert _problem(network, gradient).masks.startswith("1 of 2 masks")


def _noised(gradient):
    return [each + 1e-3 * each.std() * torch.randn_like(each) for each in gradient]


def _pruned(gradient):
    return [torch.where(each.abs() > each.abs().median(), each, 0.0) for each in gradient]


@pytest.mark.parametrize("change", [_noised, _pruned])
@pytest.mark.parametrize("make", [_usual, _smooth])
def test_no_mask_is_read_off_an_update_that_was_noised_or_pruned(make, change):
    network, _, gradient = _seen(make)
    assert _problem(network, change(gradient)).masks == ""


def test_no_mask_is_read_off_a_batch():
    network, _, gradient = _seen(_usual, count=2)
    assert _problem(network, gradient, 2).masks == ""


def test_black_pixels_of_a_first_layer_are_no_mask():
    network, batch, _ = _seen(
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))
    )
    batch.inputs[:, :, :6] = 0
    loss = F.cross_entropy(network.eval()(batch.inputs), batch.targets)
    gradient = torch.autograd.grad(loss, list(network.parameters()))
    assert _problem(network.train(), gradient).masks == ""


def test_the_answer_and_its_summary_tell_what_was_read():
    network, _, gradient = _seen(_usual)
    quick = GradientInversion(optimizer=LBFGS(iterations=1))
    steps = load_preset("gauss_newton", ["rewriting.settling.steps=0", "rewriting.products=50"])
    chosen = flwr_leakage.attacks.Strongest({"first": quick, "second": steps}, max_seconds=None)
    with pytest.warns(UserWarning, match="reads the client's masks off the update of one sample"):
        found = flwr_leakage.attack(network, tuple(gradient), spec=SPEC, preset=chosen)
    assert found.stats["dropout"] == "2 of 2 masks of dropout read off"
    assert found.summary.endswith("; 2 of 2 masks of dropout read off")
