import pytest
import torch
from attacked import observe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.chain import trace_chain
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.layer_equations import Whitened, gradient_equations
from flwr_leakage.attacks.masks import MaskSearch
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 12, 12), 4, (0.4,), (0.3,))


def generator():
    return torch.Generator().manual_seed(0)


def relu_case(batch_norm=False):
    """A search for the masks of a first layer, its true outputs, and what made them."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 10, 3, padding=1, bias=not batch_norm)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(10))
        nn.init.uniform_(layers[1].running_mean, -0.2, 0.2)
        nn.init.uniform_(layers[1].weight, -1.5, 1.5)
        nn.init.uniform_(layers[1].bias, -0.5, 0.5)
    layers += [nn.ReLU(), nn.Conv2d(10, 12, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten()]
    gradient_map = GradientMap(nn.Sequential(*layers, nn.Linear(12 * 36, 4)))
    images = torch.rand(1, 1, 12, 12, generator=generator())
    observation = observe(gradient_map, Batch(images, torch.tensor([2])), LocalSchedule(1.0))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    first, second, last = trace_chain(problem)
    bias = problem.gradient[f"{last.name}bias"]
    features = mean_feature(problem.gradient[f"{last.name}weight"], bias).reshape(1, 12, 6, 6)
    errors = last.pull_back(bias[None]).reshape(features.shape) * (features > 0)
    equations = gradient_equations(
        second, errors, problem.gradient[f"{second.name}weight"], rank_tolerance=1e-4
    )
    errors = second.pull_back(errors)[0].flatten(1) * first.scale[:, None]
    assert first.bias_gradient is not None
    search = MaskSearch(equations, errors, first.bias_gradient, tolerance=1e-7)
    preactivations = first.preactivation(images.double())[0].flatten(1)
    return search, preactivations, first, images.double()


@pytest.mark.parametrize("batch_norm", [False, True])
def test_proven_masks_are_right(batch_norm):
    search, preactivations, *_ = relu_case(batch_norm)
    masks = search.begin()
    assert 0 < int(masks.certain.sum()) < len(masks.certain)
    right = (masks.active == (preactivations > 0)).all(dim=1)
    assert bool(right[masks.certain].all())
    assert bool(((masks.features > 0) <= masks.active).all())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_candidate_near_the_truth_proves_the_other_masks(batch_norm):
    search, preactivations, first, images = relu_case(batch_norm)
    masks = search.begin()
    noise = 0.01 * torch.randn(images.shape, generator=generator(), dtype=torch.float64)
    refined = search.refine(masks, first.preactivation(images + noise)[0].flatten(1))
    assert int(refined.certain.sum()) > int(masks.certain.sum())
    assert bool(refined.certain[masks.certain].all())
    right = (refined.active == (preactivations > 0)).all(dim=1)
    assert bool(right[refined.certain].all())


@given(st.integers(0, 2**31), st.booleans())
@settings(deadline=None)
def test_the_biass_gradient_tells_right_masks_from_wrong_ones(seed, spoilt):
    stream = torch.Generator().manual_seed(seed)
    errors = torch.randn(1, 20, generator=stream, dtype=torch.float64)
    features = torch.rand(1, 20, generator=stream, dtype=torch.float64).add(0.1)
    features = features * (torch.rand(1, 20, generator=stream) < 0.5)
    bias_gradient = (errors * (features > 0)).sum(1) + (1e-3 if spoilt else 0.0)
    equations = Whitened(
        torch.eye(20, dtype=torch.float64), features.T, torch.ones(20, dtype=torch.float64)
    )  # nothing is open
    search = MaskSearch(equations, errors, bias_gradient, tolerance=1e-9)
    masks = search.begin()
    assert bool(masks.certain[0]) is not spoilt
    if not spoilt:
        assert torch.equal(masks.active, features > 0)
        torch.testing.assert_close(masks.features, features)
