import math

import pytest
import torch
from torch import nn

from flwr_leakage.metrics import classifier_utility, label_accuracy, utility_of
from flwr_leakage.records import Batch


def test_label_accuracy_is_per_sample():
    assert label_accuracy(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])) == (1.0, 0.0, 1.0)
    # Three labels in another order, and one that is not there twice.
    assert label_accuracy(torch.tensor([2, 5, 5]), torch.tensor([5, 2, 2])) == (1.0, 1.0, 0.0)
    assert label_accuracy(torch.tensor([7, 8, 1]), torch.tensor([1, 1])) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"targets must be \(B,\) or \(B, K\), got \(1, 1, 1\)"):
        label_accuracy(torch.zeros(1, 1, 1), torch.zeros(1))


class FirstPixelIsTheLabel(nn.Module):
    """Logits that put the class of the first pixel ahead by log(2)."""

    def forward(self, inputs):
        return nn.functional.one_hot(inputs[:, 0, 0, 0].long(), 3) * math.log(2.0)


def test_utility_is_the_mean_over_samples_not_over_batches():
    inputs = torch.tensor([0.0, 1.0, 2.0, 0.0]).reshape(4, 1, 1, 1)
    batch = Batch(inputs, torch.tensor([0, 1, 2, 1]))  # the last one is wrong
    model = FirstPixelIsTheLabel().train()
    result = classifier_utility(model, [batch[:3], batch[3:]])
    assert result.accuracy == 0.75 and result.num_examples == 4
    # Softmax of (log 2, 0, 0) is (1/2, 1/4, 1/4).
    assert result.loss == pytest.approx((3 * math.log(2) + math.log(4)) / 4)
    assert model.training
    # A function of the inputs will do as well; soft targets count by their largest entry.
    soft = Batch(inputs, nn.functional.one_hot(batch.targets, 3) * 0.7 + 0.1)
    assert utility_of(model.forward, [soft]).accuracy == 0.75


def test_batch_norm_statistics_are_used_and_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = Batch(torch.rand(5, 1, 2, 2), torch.zeros(5).long())
    classifier_utility(model, [batch])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_sample_is_an_error():
    with pytest.raises(ValueError, match="at least one sample, got none"):
        classifier_utility(FirstPixelIsTheLabel(), [])


def test_each_predicted_token_of_a_text_counts_once():
    ids = torch.tensor([[1, 2, 2, 0], [2, 1, 0, 0]])
    logits = 9.0 * torch.nn.functional.one_hot(torch.full((2, 4), 2), 3)
    found = utility_of(lambda _: logits, [Batch(ids, ids)], padding=0)
    assert (found.accuracy, found.num_examples) == (2 / 3, 3)
    assert utility_of(lambda _: logits, [Batch(ids, ids)]).num_examples == 6
