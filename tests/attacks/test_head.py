"""Samples told apart by the gradient of the last layer."""

from dataclasses import replace

import pytest
import torch
from attacked import observe
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, ExactBatch, pose
from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.labels.head import error_targets, split_head, told_labels
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import following
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 10, (0.4,), (0.3,))
LABELS = [1, 4, 4, 8]


def convolutional(activation, seed=0, dropout=0.0, scale=2):
    """A network whose confident softmax tells no counts, as in trained ones."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        *(nn.Conv2d(1, 6, 3, stride=2, padding=1), activation(), nn.Flatten()),
        *(nn.Linear(96, 40), activation(), nn.Dropout(dropout), nn.Linear(40, 10)),
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= scale
    return network


def seen_of(network, labels=LABELS, loss=F.cross_entropy, seed=0, schedule=None):
    torch.manual_seed(100 + seed)
    inputs = SPEC.normalize(torch.rand(len(labels), *SPEC.shape))
    gradient_map = GradientMap(network, loss)
    schedule = schedule or LocalSchedule(0.1, 1, len(labels))
    batch = Batch(inputs, torch.tensor(labels))
    return gradient_map, inputs, observe(gradient_map, batch, schedule)


def problem_of(network, **told):
    gradient_map, inputs, seen = seen_of(network, **told)
    return inputs, pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)


def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_errors_and_features_are_those_of_the_batch(activation, smoothing):
    network = convolutional(activation)
    loss = following(nn.CrossEntropyLoss(label_smoothing=smoothing))
    inputs, problem = problem_of(network, loss=loss)
    told = split_head(problem, rng())
    assert told.is_whole
    assert sorted(told.labels.tolist()) == LABELS
    assert sorted(told_labels(problem).tolist()) == LABELS
    features = network.double()[:6](inputs.double()).detach()
    found = told.duals @ told.factor.right
    distances = torch.cdist(found, features) / features.norm(dim=1)
    assert float(distances.min(1).values.max()) < 1e-4
    own = distances.argmin(1)
    assert sorted(own.tolist()) == [0, 1, 2, 3]
    logits = network[6](features[own]).detach().requires_grad_()
    (errors,) = torch.autograd.grad(loss(logits, told.labels), logits)
    torch.testing.assert_close(told.errors, errors, rtol=0, atol=1e-5)


def test_masks_of_dropout_behind_the_features_hide_no_label():
    torch.manual_seed(0)
    network = convolutional(nn.ReLU, dropout=0.5)
    _, problem = problem_of(network)  # in train mode
    assert sorted(told_labels(problem).tolist()) == LABELS


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_noise_and_a_scaled_update_tell_nothing_rather_than_something_wrong(share):
    _, problem = problem_of(convolutional(nn.Tanh))
    gradient = {
        name: value + share * value.square().mean().sqrt() * torch.randn_like(value)
        for name, value in problem.gradient.items()
    }
    assert not len(told_labels(replace(problem, gradient=gradient)))
    assert not len(told_labels(problem.divided(0.5)))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"labels": [1]}, "2 to 5 samples"),
        ({"labels": [0, 1, 2, 3, 4, 5]}, "2 to 5 samples"),
        ({"schedule": LocalSchedule(0.1, 2, 4)}, "one plain step"),
        ({"loss": nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))}, "no cross-entropy"),
        ({"loss": lambda z, y: (z - F.one_hot(y, 10)).square().mean()}, "no cross-entropy"),
    ],
)
def test_what_does_not_apply_is_refused_in_words(told, reason):
    if isinstance(told.get("loss"), nn.Module):
        told = {"loss": following(told["loss"])}
    _, problem = problem_of(convolutional(nn.Tanh), **told)
    with pytest.raises(ValueError, match=reason):
        split_head(problem, rng())
    assert not len(told_labels(problem))


def test_a_head_without_a_bias_is_refused():
    network = convolutional(nn.Tanh)
    network[6].bias = None
    _, problem = problem_of(network)
    with pytest.raises(ValueError, match="bias"):
        split_head(problem, rng())


def test_targets_are_read_off_the_loss():
    smoothed = error_targets(nn.CrossEntropyLoss(label_smoothing=0.2), 5)
    assert smoothed is not None
    expected = 0.8 * torch.eye(5, dtype=torch.float64) + 0.04
    torch.testing.assert_close(smoothed, expected)


def test_counts_keep_the_labels_that_are_told():
    _, problem = problem_of(convolutional(nn.Tanh, scale=4), seed=3)
    assert ClassCounts()(problem, rng()).tolist() == LABELS
    assert ClassCounts(signs=False)(problem, rng()).tolist() != LABELS


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_features_of_every_linear_layer_follow(activation):
    network = convolutional(activation)
    gradient_map, inputs, seen = seen_of(network)
    (result,) = ExactBatch()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    found = result.stats["features"]
    assert found.stats["accepted"] == {"last layer": 4}
    # The ReLU leads to the layer in front, where the features are proven.
    first = activation is nn.ReLU
    assert found.layer == ("3" if first else "6")
    assert found.proven == (4 if first else 0)
    features = network.double()[: 3 if first else 6](inputs.double()).detach()
    distances = torch.cdist(found.inputs.double(), features) / features.norm(dim=1)
    assert float(distances.min(1).values.max()) < 1e-3
