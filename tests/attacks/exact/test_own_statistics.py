from dataclasses import replace

import pytest
import torch
from attacked import observe

from flwr_leakage.attacks.budget import UNLIMITED
from flwr_leakage.attacks.exact.feature_fit import noise_images
from flwr_leakage.attacks.exact.pooled_stem import fit_stem
from flwr_leakage.attacks.exact.recover_features import recover_features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models.resnet import ResNet
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel


def a_problem(stem, sends_buffers=True, mode="batch"):
    torch.manual_seed(0)
    shape = (3, 16, 16)
    blocks, width = ((1, 1, 1), 64) if stem == "small" else ((1, 1), 32)
    network = ResNet(shape, 4, blocks, width, stem=stem)
    gradient_map = GradientMap(network, batch_norm=mode)
    spec = InputSpec(shape, 4, (0.5,) * 3, (0.25,) * 3)
    inputs = torch.randn(1, *shape)
    if stem == "large":
        images = noise_images(spec, 1, torch.Generator().manual_seed(0))
        inputs = spec.normalize(images)
    batch = Batch(inputs, torch.tensor([2]))
    observation = observe(gradient_map, batch, LocalSchedule(1.0))
    if mode == "batch" and sends_buffers:
        network.train()(batch.inputs)
        update = replace(observation.update, buffers=dict(network.named_buffers()))
        observation = replace(observation, update=update)
    problem = pose(gradient_map, spec, observation, ThreatModel()).to(torch.float64)
    return problem, batch.inputs.double()


def outputs_of(problem, inputs, windows=()):
    walk = ReluWalk(problem, inputs, pooled=dict(windows))
    return lambda number: walk.compared(number).clamp_min(0)


def test_features_are_read_through_batch_norm_in_train_mode():
    problem, inputs = a_problem("small")
    found = recover_features(problem)
    truth = outputs_of(problem.held, inputs)
    assert min(found.outputs) <= 3
    for number, known in found.outputs.items():
        error = (known - truth(number)).norm() / truth(number).norm()
        assert error < 1e-3, number


def test_without_buffers_nothing_is_read_behind_batch_norm_in_train_mode():
    problem, _ = a_problem("small", sends_buffers=False)
    with pytest.raises(ValueError, match="does not tell the statistics"):
        recover_features(problem)


def test_features_are_read_through_overlapping_max_pooling_and_fitted():
    problem, inputs = a_problem("large", mode="running")
    found = recover_features(problem)
    assert found.table is not None
    assert found.windows == {0: (3, 3)}
    truth = outputs_of(problem, inputs, found.windows)(0)
    torch.testing.assert_close(found.outputs[0], truth, atol=1e-4, rtol=1e-4)
    fit = fit_stem(problem.to(torch.float32), found.first(1), UNLIMITED)
    assert (fit.inputs - inputs).norm() < 1e-4 * inputs.norm()
    assert fit.value < 1e-8
    own, _ = a_problem("large")  # with a batch's own statistics, the gradient has one more term
    assert fit_stem(own.held.to(torch.float32), found.first(1), UNLIMITED) is None
