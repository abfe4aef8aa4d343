"""An input whose error turns the sign of one pre-activation is set right within that error."""

import pytest
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks.budget import UNLIMITED
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.feature_fit import settle_signs
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

ERROR = 1e-6


@pytest.fixture
def missed():
    """A problem, and an input 1e-6 off its truth with another sign of one pre-activation."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    truth = Batch(torch.rand(1, 1, 4, 4).double(), torch.tensor([1]))
    with torch.no_grad():  # one unit lies just above zero
        net[1].bias[0] -= net[1](truth.inputs.flatten(1))[0, 0] - ERROR / 4
    gradient_map, spec = GradientMap(net), InputSpec((1, 4, 4), 3)
    seen = observe(gradient_map, truth, LocalSchedule(1.0))
    problem = pose(gradient_map, spec, seen, ThreatModel())
    problem = problem.to(torch.float64)
    row = net[1].weight[0].detach().reshape(1, 1, 4, 4)
    off = truth.inputs - ERROR / 2 * row / row.square().sum()
    return problem, Batch(off, truth.targets)


def test_an_input_within_the_error_meets_the_gradient(missed):
    problem, batch = missed
    before = gradient_distance(problem, batch)
    assert before > 1e-4
    found, distance = settle_signs(
        problem, batch, [ERROR, 10 * ERROR], 1e-9, 24, torch.Generator().manual_seed(0), UNLIMITED
    )
    assert distance == gradient_distance(problem, found) < 1e-9
    assert float((found.inputs - batch.inputs).abs().max()) < 50 * ERROR


def test_what_no_draw_mends_stays_as_it_is(missed):
    problem, batch = missed
    generator = torch.Generator().manual_seed(0)
    found, distance = settle_signs(problem, batch, [1e-12], 1e-9, 4, generator, UNLIMITED)
    assert distance == pytest.approx(gradient_distance(problem, batch)) and distance > 1e-4
    assert torch.allclose(found.inputs, batch.inputs, atol=1e-10)


def test_an_input_that_meets_the_gradient_is_not_touched(missed):
    problem, batch = missed
    generator = torch.Generator().manual_seed(0)
    found, _ = settle_signs(problem, batch, [ERROR], 1.0, 4, generator, UNLIMITED)
    assert found is batch
    assert generator.get_state().equal(torch.Generator().manual_seed(0).get_state())
