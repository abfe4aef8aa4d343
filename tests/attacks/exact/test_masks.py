from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked import observe
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import known_of
from torch import nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.exact.chain import trace_chain
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.masks import (
    Channel,
    MaskEvidence,
    proven_channels,
    sets_of_ranks,
)
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 12, 12), 4, (0.4,), (0.3,))
PROOF, STRICT = 1e-7, 1e-12


def generator():
    return torch.Generator().manual_seed(0)


def relu_case(batch_norm=False):
    """What tells of the masks of a first layer, its true outputs, and what made them."""
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
    equations = Whitened.by_svd(*second.equations(errors), rank_tolerance=1e-4)
    errors = second.pull_back(errors)[0].flatten(1) * first.scale[:, None]
    assert first.bias_gradient is not None
    gradient = first.weight_gradient.flatten(1)
    evidence = MaskEvidence(equations, errors, first.bias_gradient, gradient, PROOF)
    preactivations = first.preactivation(images.double())[0].flatten(1)
    return evidence, preactivations, first, images.double()


@pytest.mark.parametrize("batch_norm", [False, True])
def test_proven_masks_are_right(batch_norm):
    evidence, preactivations, *_ = relu_case(batch_norm)
    known = evidence.begin()
    proven = proven_channels(known.mask)
    assert 0 < int(proven.sum()) < len(proven)
    right = (known.mask.on == (preactivations > 0)).all(dim=1)
    assert bool(right[proven].all())
    assert bool(((known.values > 0) <= known.mask.on).all())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_candidate_near_the_truth_proves_the_other_masks(batch_norm):
    evidence, preactivations, first, images = relu_case(batch_norm)
    known = evidence.begin()
    noise = 0.01 * torch.randn(images.shape, generator=generator(), dtype=torch.float64)
    z = first.preactivation(images + noise)[0].flatten(1)
    refined = evidence.refine(known, z, first.patches(images + noise))
    before, after = (proven_channels(each.mask) for each in (known, refined))
    assert int(after.sum()) > int(before.sum())
    assert bool(after[before].all())
    right = (refined.mask.on == (preactivations > 0)).all(dim=1)
    assert bool(right[after].all())


def test_a_weights_gradient_is_the_patches_times_the_errors():
    evidence, preactivations, first, images = relu_case()
    errors = evidence.errors * (preactivations > 0)
    torch.testing.assert_close(
        errors @ first.patches(images).T, evidence.weight_gradient, rtol=0, atol=1e-7
    )


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
    evidence = MaskEvidence(equations, errors, bias_gradient, torch.zeros(1, 1), 1e-9)
    known = evidence.begin()
    assert bool(proven_channels(known.mask)[0]) is not spoilt
    if not spoilt:
        assert torch.equal(known.mask.on, features > 0)
        torch.testing.assert_close(known.values, features)


def test_of_masks_that_the_bias_proves_the_one_that_explains_the_weights_is_taken():
    stream = generator()
    errors = torch.randn(1, 20, generator=stream, dtype=torch.float64)
    errors[0, 5] = errors[0, 3]  # their sum does not tell which of the two is active
    patches = torch.rand(6, 20, generator=stream, dtype=torch.float64)
    z = torch.randn(1, 20, generator=stream, dtype=torch.float64)
    z[0, 3], z[0, 5] = 0.01, -0.01
    active = z > 0
    rows = torch.linalg.qr(torch.randn(20, 2, generator=stream, dtype=torch.float64))[0].T
    equations = Whitened(rows, rows @ z.clamp_min(0).T, torch.ones(2, dtype=torch.float64))
    evidence = MaskEvidence(
        equations, errors, (errors * active).sum(1), (errors * active) @ patches.T, STRICT
    )
    unknown = Known.nothing(errors)
    candidate = z.clone()
    candidate[0, 3], candidate[0, 5] = -0.01, 0.01
    refined = evidence.refine(unknown, candidate, patches)
    assert torch.equal(refined.mask.on, active)


def test_a_mask_that_explains_the_weights_no_better_than_the_candidates_is_not_believed():
    errors = torch.tensor([[1.0, -0.7, 0.4]], dtype=torch.float64)
    patches = torch.eye(3, dtype=torch.float64)
    z = torch.tensor([[1.0, -0.1, 0.1]], dtype=torch.float64)
    rows = torch.ones(1, 3, dtype=torch.float64) / 3**0.5
    equations = Whitened(rows, rows @ z.T, torch.ones(1, dtype=torch.float64))
    weights = (errors * (z > 0)) @ patches.T
    by_accident = errors[:, :2].sum(1)
    evidence = MaskEvidence(equations, errors, by_accident, weights, STRICT)
    unknown = Known.nothing(errors)
    assert bool(evidence.refine(unknown, z, patches).mask.open.all())
    explained = replace(evidence, weight_gradient=errors * torch.tensor([[1.0, 1.0, 0.0]]))
    assert not bool(explained.refine(unknown, z, patches).mask.open.any())


def test_entries_without_an_error_are_not_flipped():
    errors = torch.tensor([[1.0, 0.0, 0.4, 0.0]], dtype=torch.float64)
    z = torch.tensor([[1.0, 0.1, -0.2, -0.1]], dtype=torch.float64)
    equations = Whitened(
        torch.ones(1, 4, dtype=torch.float64) / 2, torch.zeros(1, 1).double(), torch.ones(1)
    )
    channel = MaskEvidence(equations, errors, errors[:, 0], errors, STRICT).channel(0)
    found = list(channel.flipped(z[0].numpy(), sets_of_ranks()))
    assert [mask.tolist() for mask in found] == [[True, True, False, False]]


def test_flips_are_all_sets_of_so_many_ranks():
    assert [each.shape for each in sets_of_ranks()] == [(1, 0), (24, 1), (276, 2), (2024, 3)]


def test_a_mask_that_differs_in_thousands_of_entries_is_only_a_bad_one():
    count = 8000
    channel = Channel(
        errors=np.ones(count), bias_gradient=1.0, weight_gradient=np.ones(1), slack=1e-7
    )
    misfit = channel.misfit(np.zeros(count, bool), np.ones((1, count)))
    assert misfit(np.zeros(count, bool)) == 0.0
    assert 850 < misfit(np.ones(count, bool)) < 860


def equations_for(truth, rows):
    singular = torch.linspace(1, 0.1, len(rows), dtype=torch.float64)
    return Whitened(rows, rows @ truth.T, singular)


def test_values_beyond_the_equations_rank_and_unseen_places_are_not_told():
    rows = torch.linalg.qr(torch.randn(20, 6, generator=generator(), dtype=torch.float64))[0].T
    rows[:, 3] = 0  # no equation sees this position
    truth = torch.rand(2, 20, generator=generator(), dtype=torch.float64) + 0.1
    truth[1, 3:] = 0
    known = known_of(equations_for(truth, rows), truth > 0)
    assert bool(known.mask.on[0].all())
    assert not bool(known.told[0].any())
    assert known.told[1].tolist() == [place != 3 for place in range(20)]
    torch.testing.assert_close(known.values[1], truth[1])
    assert known.mask.open.nonzero().tolist() == [[1, 3]]


def test_a_proof_of_one_channel_leaves_the_others_as_they_are():
    truth = torch.rand(2, 20, generator=generator(), dtype=torch.float64) + 0.1
    truth[:, 4:] = 0
    rows = torch.linalg.qr(torch.randn(20, 6, generator=generator()).double())[0].T
    known = known_of(equations_for(truth, rows), truth > 0, torch.tensor([False, True]))
    assert bool(known.mask.open[0].all())
    assert not bool(known.values[0].any())
    torch.testing.assert_close(known.values[1], truth[1])
