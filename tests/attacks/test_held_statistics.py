"""A client in train mode whose buffers tell the statistics that it normalised by."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flwr_leakage
from flwr_leakage.attacks.one_call import ParameterChange, as_observation
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 3, (0.0,), (1.0,))
SCHEDULE = LocalSchedule(0.5, batch_size=4)


def _network(affine=True, activation=nn.ReLU):
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6, affine=affine), activation()),
        *(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), activation()),
        *(nn.Flatten(), nn.Linear(128, 3)),
    )
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d) and layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 2.0)
            nn.init.normal_(layer.bias)
    return layers.train()


def _change(network, batch):
    """The state before and after one step of torch's own SGD."""
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), SCHEDULE.learning_rate)
    F.cross_entropy(network(batch.inputs), batch.targets).backward()
    optimizer.step()
    after = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(before)
    return ParameterChange(before, after)


def _problem(change, network, count, knowledge="none"):
    gradient_map = GradientMap(network, batch_norm="batch")
    seen = as_observation(gradient_map, change, count, SCHEDULE, None, 0, ())
    return pose(gradient_map, SPEC, seen, ThreatModel(batch_norm=knowledge))


def _batch(count):
    torch.manual_seed(1)
    return Batch(torch.rand(count, *SPEC.shape).double(), torch.arange(count) % 3)


def _error(problem, batch):
    found = problem.gradient_map(problem.params, batch, problem.buffers)
    gap, seen = ravel(found) - ravel(problem.gradient), ravel(problem.gradient)
    return float(gap.norm() / seen.norm())


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("knowledge", ["none", "derived"])
def test_the_private_samples_have_the_gradient_that_was_observed(count, knowledge):
    network, batch = _network().double(), _batch(count)
    own = _problem(_change(network, batch), network, count, knowledge)
    held = own.held
    assert not held.gradient_map.uses_batch_statistics
    assert _error(held, batch) < 1e-9
    plain = replace(held, gradient_map=own.gradient_map.with_batch_norm("running"))
    assert _error(plain, batch) > 0.1
    assert held.held is held


def test_the_contrast_of_an_image_shows_in_the_held_gradient_alone():
    network, batch = _network().double(), _batch(1)
    own = _problem(_change(network, batch), network, 1)
    brighter = Batch(1.5 * batch.inputs, batch.targets)
    assert _error(own, brighter) < 1e-3 < 1e-1 < _error(own.held, brighter)


def _withheld(change):
    after = {name: change.after[name] for name in change.after if "running" not in name}
    return replace(change, after=after)


def _unmoved(change):
    kept = {name: value for name, value in change.before.items() if "running" in name}
    return replace(change, after={**change.after, **kept})


@pytest.mark.parametrize("hide", [_withheld, _unmoved])
def test_buffers_that_tell_nothing_leave_the_problem_as_it_is(hide):
    network = _network().double()
    own = _problem(hide(_change(network, _batch(4))), network, 4)
    assert own.held is own


def test_a_layer_without_weights_leaves_the_problem_as_it_is():
    network = _network(affine=False).double()
    own = _problem(_change(network, _batch(4)), network, 4)
    assert own.own_statistics
    assert own.held is own


def test_the_buffers_that_a_client_sends_give_its_image_away():
    network = _network(activation=nn.SiLU)
    image = torch.linspace(0.2, 0.6, 8)[:, None] + 0.2 * torch.eye(8)
    batch = Batch(image[None, None], torch.tensor([1]))
    change = _change(network, batch)
    errors = []
    for sent in (change, _withheld(change)):
        found = flwr_leakage.attack(
            network, sent, spec=SPEC, schedule=SCHEDULE, preset="gauss_newton_smooth"
        )
        errors.append(float((found.batch.inputs - batch.inputs).square().mean().sqrt()))
    assert errors[0] < 3e-3 < 3e-2 < errors[1]
