import pytest
import torch
from attacked import observe, tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import Analytic, AttackJob, AutomaticLabels, pose
from flwr_leakage.attacks.labels.assumed import NearestGradient, SignOfGradient
from flwr_leakage.attacks.labels.counts import (
    ClassCounts,
    class_counts,
    mean_feature,
    possible_classes,
)
from flwr_leakage.attacks.loss_check import lowers_one_logit
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import following
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
INFERRED = ThreatModel(labels="inferred")


def problem_of(labels, *, seed=0, steps=1, bias=True, loss=F.cross_entropy, scale=1.0):
    network = tiny_network(seed)
    if not bias:
        network[-1].bias = None
    network[-1].weight.data *= scale
    gradient_map = GradientMap(network, loss)
    generator = torch.Generator().manual_seed(seed)
    inputs = SPEC.normalize(torch.rand(len(labels), *SPEC.shape, generator=generator))
    schedule = LocalSchedule(0.01, num_steps=steps, batch_size=len(labels))
    observation = observe(gradient_map, Batch(inputs, torch.tensor(labels)), schedule)
    return pose(gradient_map, SPEC, observation, INFERRED)


@settings(max_examples=20, deadline=None)
@given(label=st.integers(0, 3), seed=st.integers(0, 50), bias=st.booleans())
def test_idlg_is_exact_for_one_sample(label, seed, bias):
    problem = problem_of([label], seed=seed, bias=bias)
    assert SignOfGradient()(problem, torch.Generator()).tolist() == [label]


def test_idlg_refuses_a_batch():
    with pytest.raises(ValueError, match="1 sample"):
        SignOfGradient()(problem_of([0, 1]), torch.Generator())


WIDE = InputSpec((1, 8, 8), 10, (0.4,), (0.3,))


def confident(labels, *, seed=0, loss=F.cross_entropy):
    """The update of a network whose mean softmax tells no labels, as in trained ones."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    for weight in (network[1].weight, network[3].weight):
        weight.data *= 3
    inputs = WIDE.normalize(torch.rand(len(labels), *WIDE.shape))
    gradient_map = GradientMap(network, loss)
    batch, schedule = Batch(inputs, torch.tensor(labels)), LocalSchedule(0.01, 1, len(labels))
    return pose(gradient_map, WIDE, observe(gradient_map, batch, schedule), INFERRED)


@pytest.mark.parametrize("seed", range(6))
def test_signs_in_the_span_of_errors_tell_the_labels(seed):
    problem = confident([1, 4, 8], seed=seed)
    weight, bias = list(problem.gradient.values())[-2:]
    possible = possible_classes(weight, bias, 3)
    assert possible.nonzero().flatten().tolist() == [1, 4, 8]
    assert ClassCounts()(problem, torch.Generator()).tolist() == [1, 4, 8]


def test_labels_that_occur_are_possible_whatever_the_batch_and_the_weights():
    for seed, labels in enumerate(([3], [2, 2, 5], [0, 1, 2, 3, 4, 5, 5], list(range(10)))):
        weighted = nn.CrossEntropyLoss(weight=torch.linspace(1, 3, 10))
        for loss in (F.cross_entropy, weighted):
            problem = confident(labels, seed=seed, loss=loss)
            weight, bias = list(problem.gradient.values())[-2:]
            assert possible_classes(weight, bias, len(labels))[labels].all()


def test_rounding_of_what_is_sent_hides_no_label():
    problem = confident([1, 4, 8])
    weight, bias = list(problem.gradient.values())[-2:]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    noise *= 1e-5 * weight.norm() / noise.norm()
    assert possible_classes(weight + noise, bias, 3).nonzero().flatten().tolist() == [1, 4, 8]


def test_smoothed_labels_lower_several_logits():
    assert lowers_one_logit(F.cross_entropy, 10)
    assert lowers_one_logit(following(nn.CrossEntropyLoss(torch.linspace(1, 3, 10))), 10)
    assert not lowers_one_logit(nn.CrossEntropyLoss(label_smoothing=0.1), 10)


def test_noise_leaves_all_classes_possible():
    problem = confident([1, 4, 8])
    weight, bias = list(problem.gradient.values())[-2:]
    noise = 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    assert possible_classes(weight + noise, bias, 3).all()


@settings(max_examples=20, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_counts_are_exact_given_the_mean_softmax(labels):
    true = torch.bincount(torch.tensor(labels), minlength=4)
    softmax = torch.tensor([0.1, 0.2, 0.3, 0.4])
    gradient = softmax - true / len(labels)
    assert class_counts(gradient, softmax, len(labels)).tolist() == true.tolist()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), num_samples=st.integers(1, 9))
def test_counts_always_sum_to_the_batch(seed, num_samples):
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(5, generator=generator)
    softmax = torch.rand(5, generator=generator).softmax(0)
    counts = class_counts(gradient, softmax, num_samples)
    assert int(counts.sum()) == num_samples
    assert int(counts.min()) >= 0


@pytest.mark.parametrize("steps", [1, 2])
def test_repeated_classes_of_a_batch_are_counted(steps):
    labels = [0, 0, 1, 3, 3, 3]
    problem = problem_of(labels, steps=steps)
    assert ClassCounts()(problem, torch.Generator()).tolist() == labels
    # dummy images are another distribution than the data: one sample may be misplaced
    found = ClassCounts("dummies")(problem, torch.Generator().manual_seed(0))
    missed = torch.bincount(found, minlength=4) - torch.bincount(torch.tensor(labels), minlength=4)
    assert int(missed.abs().sum()) <= 2


class Backwards(nn.Module):
    """Its layers are made in another order than they are used, and the head is no module."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.randn(4, 12) / 3)
        self.bias = nn.Parameter(torch.zeros(4))
        self.other = nn.Linear(9, 4)  # of something else
        self.body = nn.Linear(64, 12)

    def forward(self, x):
        return nn.functional.linear(self.body(x.flatten(1)).sigmoid(), self.head, self.bias)


def network_of(kind):
    torch.manual_seed(0)
    if kind == "backwards":
        return Backwards()
    layers = [nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)]
    if kind == "convolution, ReLU":
        return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if kind == "convolution":
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LogSoftmax(1))


@pytest.mark.parametrize("kind", ["backwards", "convolution", "log-softmax"])
@pytest.mark.parametrize("labels", [[2], [0, 1, 1, 3]])
def test_the_head_is_found_by_what_it_does(kind, labels):
    gradient_map = GradientMap(network_of(kind))
    inputs = SPEC.normalize(torch.rand(len(labels), *SPEC.shape, generator=rng(3)))
    schedule = LocalSchedule(0.01, batch_size=len(labels))
    observation = observe(gradient_map, Batch(inputs, torch.tensor(labels)), schedule)
    problem = pose(gradient_map, SPEC, observation, INFERRED)
    assert AutomaticLabels()(problem, rng(0)).tolist() == labels


def test_a_share_of_a_bias_tells_the_label_of_one_sample_only():
    gradient_map = GradientMap(network_of("convolution, ReLU"))
    batch = Batch(
        SPEC.normalize(torch.rand(2, *SPEC.shape, generator=rng(3))), torch.tensor([2, 1])
    )
    observation = observe(gradient_map, batch[:1], LocalSchedule(0.01))
    problem = pose(gradient_map, SPEC, observation, INFERRED)
    assert AutomaticLabels()(problem, rng(0)).tolist() == [2]
    observation = observe(gradient_map, batch, LocalSchedule(0.01, batch_size=2))
    with pytest.raises(ValueError, match="need a bias of the logits"):
        AutomaticLabels()(pose(gradient_map, SPEC, observation, INFERRED), rng(0))


@pytest.mark.parametrize("labels", [[2], [0, 1]])
def test_labels_are_not_read_from_a_frozen_head(labels):
    network = tiny_network()
    network[-1].requires_grad_(False)
    gradient_map = GradientMap(network)
    batch = Batch(torch.rand(len(labels), *SPEC.shape, generator=rng(3)), torch.tensor(labels))
    observation = observe(gradient_map, batch, LocalSchedule(0.01, batch_size=len(labels)))
    problem = pose(gradient_map, SPEC, observation, INFERRED)
    method = SignOfGradient() if len(labels) == 1 else AutomaticLabels()
    with pytest.raises(ValueError, match=r"is trained, the model has none|and it is frozen"):
        method(problem, rng(0))


def rng(seed):
    return torch.Generator().manual_seed(seed)


def test_mean_feature_of_one_sample_is_the_last_layers_input():
    problem = problem_of([2])
    names = list(problem.params)
    feature = mean_feature(problem.gradient[names[-2]], problem.gradient[names[-1]])
    gradient = torch.outer(problem.gradient[names[-1]], feature)
    torch.testing.assert_close(gradient, problem.gradient[names[-2]], atol=1e-5, rtol=0)


def test_a_last_layer_of_another_width_is_named():
    gradient_map = GradientMap(tiny_network(classes=3))
    batch = Batch(torch.zeros(1, 1, 8, 8), torch.tensor([0]))
    observation = observe(gradient_map, batch, LocalSchedule(0.1))
    with pytest.raises(ValueError, match="4 classes, got 3"):
        SignOfGradient()(pose(gradient_map, SPEC, observation, INFERRED), torch.Generator())


def test_public_images_take_the_place_of_dummies():
    labels = [0, 0, 1, 3, 3, 3]
    problem = problem_of(labels)
    generator = torch.Generator().manual_seed(0)
    private = SPEC.normalize(torch.rand(len(labels), *SPEC.shape, generator=generator))
    found = ClassCounts("dummies", public=private)(problem, torch.Generator())
    assert found.tolist() == labels


@pytest.mark.parametrize("labels", [[0, 0, 0, 3], [1, 2, 2, 3], [3, 3, 3, 3, 0, 0]])
def test_counts_allow_for_the_weights_of_classes(labels):
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0])
    true = torch.bincount(torch.tensor(labels), minlength=4)
    softmax = torch.tensor([0.1, 0.2, 0.3, 0.4])
    gradient = softmax - true * weight / (true * weight).sum()
    assert class_counts(gradient, softmax, len(labels), 3 * weight).tolist() == true.tolist()
    problem = problem_of(labels, loss=nn.CrossEntropyLoss(weight=weight), scale=0.05)
    assert ClassCounts()(problem, torch.Generator().manual_seed(0)).tolist() == sorted(labels)


class Similar(nn.Module):
    """Logits of a cosine similarity: no layer gives them."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh())
        self.prototypes = nn.Parameter(torch.randn(4, 30))

    def forward(self, x):
        return 10 * F.cosine_similarity(self.features(x)[:, None], self.prototypes[None], dim=-1)


def similar(label, seed):
    torch.manual_seed(seed)
    gradient_map = GradientMap(Similar())
    prior = ImagePrior.of(SPEC).single()
    inputs = SPEC.clamp(prior.inputs(torch.randn(1, *SPEC.shape)))
    batch = Batch(inputs, torch.tensor([label]))
    return gradient_map, batch, observe(gradient_map, batch, LocalSchedule(1.0))


def test_a_label_that_no_layer_tells_is_that_of_the_nearest_gradient():
    for seed in range(8):
        gradient_map, batch, seen = similar(seed % 4, seed)
        problem = pose(gradient_map, SPEC, seen, INFERRED)
        with pytest.raises(ValueError, match="linear layer"):
            SignOfGradient()(problem, torch.Generator())
        for labels in (AutomaticLabels(), NearestGradient(batch.inputs)):
            assert labels(problem, torch.Generator().manual_seed(0)).tolist() == [seed % 4]


def test_analytic_tells_the_label_by_its_image():
    gradient_map, batch, seen = similar(3, 0)
    (found,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], INFERRED))
    assert found.batch.targets.tolist() == [3]
    torch.testing.assert_close(found.batch.inputs, batch.inputs, atol=1e-4, rtol=1e-4)


def test_the_nearest_gradient_is_of_one_sample():
    with pytest.raises(ValueError, match="from 2"):
        NearestGradient()(problem_of([0, 1]), torch.Generator())
