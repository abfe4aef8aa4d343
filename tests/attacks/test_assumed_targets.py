"""What every attack takes for its targets: granted as they are, or inferred."""

from dataclasses import dataclass, replace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

from flwr_leakage.attacks import (
    LBFGS,
    Analytic,
    AttackJob,
    DenseGaussNewton,
    FeatureMatching,
    FeatureRecursion,
    GradientInversion,
    pose,
)
from flwr_leakage.attacks.labels.assumed import assume_targets
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.records import Batch, Disclosure, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
KNOWN = ThreatModel(labels="known")
HARD = torch.tensor([2])
SOFT = torch.tensor([[0.05, 0.15, 0.7, 0.1]])


def residual_network():
    torch.manual_seed(0)
    return ResNet8(SPEC.shape, SPEC.num_classes, width=16)


def linear_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))


CASES = [
    pytest.param(
        GradientInversion(optimizer=LBFGS(iterations=2)), tiny_network, id="gradient inversion"
    ),
    pytest.param(
        GradientInversion(optimizer=LBFGS(iterations=2), labels="joint"), tiny_network, id="joint"
    ),
    pytest.param(DenseGaussNewton(steps=1), tiny_network, id="dense gauss newton"),
    pytest.param(
        FeatureMatching(layer_iterations=5, fit_iterations=2), tiny_network, id="feature matching"
    ),
    pytest.param(FeatureRecursion(iterations=2), residual_network, id="feature recursion"),
    pytest.param(Analytic(), linear_network, id="analytic"),
]


def attacked(attack, network, granted, threat, trained_on=SOFT):
    gradient_map = GradientMap(network())
    image = torch.rand(1, *SPEC.shape, generator=torch.Generator().manual_seed(0))
    seen = observe(gradient_map, Batch(SPEC.normalize(image), trained_on), LocalSchedule(0.1))
    seen = replace(seen, disclosed=Disclosure(targets=granted))
    (result,) = attack(AttackJob(gradient_map, SPEC, [seen], threat))
    assert result.error == ""
    return result


@pytest.mark.parametrize(("attack", "network"), CASES)
@pytest.mark.parametrize("granted", [HARD, SOFT, SOFT.double()], ids=["hard", "soft", "double"])
def test_granted_targets_are_used_as_they_are(attack, network, granted):
    expected = HARD if granted.ndim == 1 else SOFT
    result = attacked(attack, network, granted, KNOWN, trained_on=expected)
    torch.testing.assert_close(result.batch.targets, expected)
    assert result.batch.inputs.dtype == torch.float32


@pytest.mark.parametrize(("attack", "network"), CASES)
def test_a_grant_is_taken_even_where_the_update_says_otherwise(attack, network):
    result = attacked(attack, network, torch.tensor([1]), KNOWN, trained_on=HARD)
    assert result.batch.targets.tolist() == [1]


@pytest.mark.parametrize(("attack", "network"), CASES)
def test_without_a_grant_labels_are_class_indices(attack, network):
    result = attacked(attack, network, torch.tensor([1]), ThreatModel(), trained_on=HARD)
    assert result.batch.targets.shape == (1,)
    assert result.batch.targets.dtype == torch.int64
    if getattr(attack, "labels", None) != "joint":
        assert result.batch.targets.tolist() == [2]


@dataclass(frozen=True)
class Saying:
    """A label attack that answers with given labels."""

    labels: torch.Tensor

    def __call__(self, problem, generator):
        return self.labels


def posed(targets=None, **threat):
    gradient_map = GradientMap(tiny_network())
    batch = Batch(torch.zeros(2, *SPEC.shape), torch.tensor([0, 3]))
    seen = observe(gradient_map, batch, LocalSchedule(0.1, batch_size=2))
    seen = replace(seen, disclosed=Disclosure(targets=targets))
    return pose(gradient_map, SPEC, seen, ThreatModel(**threat))


def test_the_type_says_where_targets_come_from():
    stream = torch.Generator()
    saying = Saying(torch.tensor([1, 2], dtype=torch.int32))
    inferred = assume_targets(posed(), saying, stream)
    assert (inferred.origin, inferred.may_change) == ("inferred", True)
    assert inferred.values.dtype == torch.int64
    variables = assume_targets(posed(), "joint", stream)
    assert (variables.origin, variables.may_change) == ("variables", False)
    hard = assume_targets(posed(torch.tensor([3, 3]), labels="known"), saying, stream)
    assert (hard.origin, hard.may_change, hard.values.tolist()) == ("granted", False, [3, 3])
    soft = posed(torch.full((2, 4), 0.25), labels="known").to(torch.float64)
    assert assume_targets(soft, saying, stream).values.dtype == torch.float64


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.tensor([1]), r"must infer 2 class indices, got \(1,\)"),
        (torch.rand(2, 4), "must infer 2 class indices"),
        (torch.tensor([1, 4]), r"must lie in \[0, 4\), got \[1, 4\]"),
    ],
)
def test_an_inference_that_gives_anything_else_is_refused(labels, said):
    with pytest.raises(ValueError, match=said):
        assume_targets(posed(), Saying(labels), torch.Generator())


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (torch.full((2, 3), 1 / 3), r"soft targets must have shape \(2, 4\), got \(2, 3\)"),
        (torch.zeros(2, 1, dtype=torch.int64), r"hard targets must have shape \(2,\)"),
    ],
)
def test_a_grant_of_another_shape_is_refused(targets, said):
    with pytest.raises(ValueError, match=said):
        posed(targets, labels="known")


def test_rounds_of_the_same_samples_are_granted_the_same_targets():
    gradient_map = GradientMap(tiny_network())
    batch = Batch(torch.zeros(1, *SPEC.shape), HARD)
    seen = observe(gradient_map, batch, LocalSchedule(0.1), disclose=True)
    other = replace(seen, disclosed=Disclosure(targets=torch.tensor([1])))
    pose(gradient_map, SPEC, replace(seen, earlier=(seen,)), KNOWN)
    with pytest.raises(ValueError, match="granted targets must be equal"):
        pose(gradient_map, SPEC, replace(seen, earlier=(other,)), KNOWN)
