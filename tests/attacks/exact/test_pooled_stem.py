"""Which windows of a stem's max pooling share their maximum, and the image that they tell."""

import torch
from attacked import observe
from torch.nn import functional as F

from flwr_leakage.attacks.budget import UNLIMITED
from flwr_leakage.attacks.exact.pooled_stem import Groups, fit_stem
from flwr_leakage.attacks.exact.recover_features import recover_features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models.resnet import BasicBlock, ResNet
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel


def grouped(entries, errors):
    """The groups of 3×3 windows of stride 2 over entries (C, H, W), and their true maxima."""
    values = F.max_pool2d(entries[None].clamp_min(0), 3, 2, 1)[0].flatten(1)
    height, width = entries.shape[1:]
    numbers = torch.arange(height * width, dtype=entries.dtype).reshape(1, 1, height, width)
    table = F.unfold(F.pad(numbers, (1, 1, 1, 1), value=-1), 3, stride=2)[0].long()
    groups = Groups.of(table, values, errors.flatten(1), height * width, 1e-9)
    is_maximum = (entries.flatten()[groups.entries] - groups.values).abs() <= 1e-9
    return groups, values, is_maximum & groups.allowed


def test_windows_that_share_a_maximum_are_one_group():
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    errors = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    groups, values, is_maximum = grouped(entries, errors)
    assert len(groups.values) == len(values[values > 0].unique()) < int((values > 0).sum())
    assert torch.equal(is_maximum.sum(1), torch.ones_like(groups.channels))
    positive = errors.flatten()[values.flatten() > 0]
    torch.testing.assert_close(groups.errors.sum(), positive.sum())


def test_no_window_is_lost_where_a_flat_area_repeats_a_value():
    entries = torch.full((1, 8, 8), -1.0, dtype=torch.float64)
    entries[0, 1, 1] = entries[0, 1, 3] = entries[0, 1, 5] = 2.0  # the windows overlap in a chain
    entries[0, 7, 7] = 3.0
    errors = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(1, 4, 4)
    groups, values, is_maximum = grouped(entries, errors)
    assert is_maximum.any(1).all()
    torch.testing.assert_close(groups.errors.sum(), errors.flatten()[values[0] > 0].sum())


class TwoBlocks(ResNet):
    stage_sizes = (1, 1)
    block_kind = BasicBlock


def test_features_are_read_through_overlapping_max_pooling_and_fitted():
    torch.manual_seed(0)
    shape = (3, 16, 16)
    gradient_map = GradientMap(TwoBlocks(shape, 4, 32, stem="large"), batch_norm="running")
    spec = InputSpec(shape, 4, (0.5,) * 3, (0.25,) * 3)
    pixels = F.interpolate(torch.rand(1, 3, 5, 5), 16, mode="bicubic").clamp(0, 1)
    batch = Batch(spec.normalize(pixels), torch.tensor([2]))
    observation = observe(gradient_map, batch, LocalSchedule(1.0))
    problem = pose(gradient_map, spec, observation, ThreatModel()).to(torch.float64)
    found = recover_features(problem)
    assert found.table is not None
    assert found.windows == {0: (3, 3)}
    inputs = batch.inputs.double()
    truth = ReluWalk(problem, inputs, pooled=found.windows).compared(0).clamp_min(0)
    torch.testing.assert_close(found.outputs[0], truth, atol=1e-4, rtol=1e-4)
    fit = fit_stem(problem.to(torch.float32), found.first(1), UNLIMITED)
    assert (fit.inputs - inputs).norm() < 1e-4 * inputs.norm()
    assert fit.value < 1e-8
