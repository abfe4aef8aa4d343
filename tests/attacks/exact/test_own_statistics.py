"""Features behind BatchNorm in train mode, whose statistics the sent buffers tell."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.budget import UNLIMITED
from flwr_leakage.attacks.exact.feature_fade import fade_features
from flwr_leakage.attacks.exact.feature_recursion import FeatureRecursion
from flwr_leakage.attacks.exact.last_mask import affine_binary_columns, normalised_mask, uncentred
from flwr_leakage.attacks.exact.recover_features import Features, recover_features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.one_call import ParameterChange, as_observation
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((3, 8, 8), 4, (0.5,) * 3, (0.25,) * 3)


def client(sends_buffers=True, width=32):
    """A ResNet in train mode, its image, and what the server sees after one step of torch's SGD."""
    torch.manual_seed(0)
    network = ResNet8(SPEC.shape, 4, width=width).train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.2)
    smooth = torch.randn(1, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    pixels = (0.5 + 0.15 * F.interpolate(smooth, 8, mode="bicubic")).clamp(0, 1)
    batch = Batch(SPEC.normalize(pixels), torch.tensor([2]))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    F.cross_entropy(network(batch.inputs), batch.targets).backward()
    torch.optim.SGD(network.parameters(), 1.0).step()
    after = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(before)
    gradient_map = GradientMap(network, batch_norm="batch")
    seen = as_observation(
        gradient_map, ParameterChange(before, after), 1, LocalSchedule(1.0), None, 0, ()
    )
    if not sends_buffers:
        seen = replace(seen, update=replace(seen.update, buffers={}))
    return gradient_map, batch, seen


def test_features_are_read_through_batch_norm_in_train_mode():
    gradient_map, batch, seen = client()
    problem = pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)
    found = recover_features(problem)
    truth = ReluWalk(problem.held, batch.inputs.double())
    assert len(found.outputs) >= 3
    for number, outputs in found.outputs.items():
        own = truth.preactivations[number].clamp_min(0)
        assert float((outputs - own).norm() / own.norm()) < 1e-3


def test_the_image_follows_from_features_behind_batch_norm_in_train_mode():
    gradient_map, batch, seen = client()
    (found,) = FeatureRecursion()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert found.error == ""
    error = SPEC.denormalize(found.batch.inputs) - SPEC.denormalize(batch.inputs)
    assert float(error.square().mean().sqrt()) < 1e-2
    assert found.batch.targets.tolist() == [2]


def test_without_buffers_the_statistics_are_missing():
    gradient_map, _, seen = client(sends_buffers=False)
    (found,) = FeatureRecursion()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert found.batch is None
    assert "whose statistics the update does not tell" in found.error


def test_centred_patches_get_their_mean_back():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(1, 6, 4, 4, generator=generator, dtype=torch.float64).clamp_min(0)
    patches = F.unfold(maps, 3, padding=1)[0].T.reshape(16, 6, 3, 3)
    order = torch.randperm(16, generator=generator)
    found = uncentred((patches - patches.mean(0))[order])
    torch.testing.assert_close(found, patches[order])
    with pytest.raises(ValueError, match=r"padding's zeros"):
        uncentred(torch.randn(16, 6, 3, 3, generator=generator))


def test_a_space_with_other_binary_vectors_than_expected_is_refused():
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    offset = torch.randn(60, generator=generator, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"3 masks were expected, 0 binary vectors"):
        affine_binary_columns(basis, offset, 3)
    few = torch.ones(1, 6, 2, 2)
    with pytest.raises(ValueError, match=r"6 channels are too few"):
        normalised_mask(few, torch.zeros(6, 3, 3, 3), torch.zeros(6, 3, 3, 3), few, few)


def test_an_input_is_fitted_to_features_from_grey():
    gradient_map, batch, seen = client(width=32)
    problem = pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64).held
    walk = ReluWalk(problem, batch.inputs.double())
    outputs = {number: walk.preactivations[number].clamp_min(0) for number in (1, 2)}
    found = fade_features(problem, Features(outputs, {}), 1e-10, UNLIMITED)
    assert float((found - batch.inputs).norm() / batch.inputs.norm()) < 1e-3
