"""Losses that are told before an attack not to work, and how a loss weighs classes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.loss_check import check_loss, class_weights, is_plain_mean
from flwr_leakage.losses import following

WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0])
LOGITS = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        following(nn.CrossEntropyLoss(weight=WEIGHT)),
        lambda z, y: F.mse_loss(z, torch.eye(4)[y]),
        lambda z, y: nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(z, F.one_hot(y, 4).float()),
    ],
)
def test_losses_that_work_pass(loss, count):
    check_loss(loss, count, 4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda z, y: F.nll_loss(z.log_softmax(1), y, weight=WEIGHT), "work in float64.*Double"),
        (nn.MSELoss(), r"class ids \(B,\).*\(., 4\).*one-hot"),
        (nn.BCEWithLogitsLoss(), r"class ids \(B,\).*Target size.*one-hot"),
        (nn.CrossEntropyLoss(reduction="none"), "must return a scalar"),
        (lambda z, y: 1.0, "must return a scalar"),
    ],
)
def test_losses_that_do_not_work_are_refused_in_words(loss, said, count):
    with pytest.raises(ValueError, match=said):
        check_loss(loss, count, 4)


def test_granted_probabilities_are_what_a_loss_is_tried_with():
    soft = torch.full((3, 4), 0.25)
    check_loss(nn.MSELoss(), 3, 4, soft)
    check_loss(nn.BCEWithLogitsLoss(), 3, 4, soft)
    check_loss(F.cross_entropy, 3, 4, torch.tensor([9, 9, 9]))  # told of elsewhere


def test_class_weights_are_read_off_the_loss():
    loss = following(nn.CrossEntropyLoss(weight=WEIGHT))
    found = class_weights(loss, LOGITS[0])
    torch.testing.assert_close(found, (WEIGHT / WEIGHT.mean()).double())
    assert not is_plain_mean(loss, LOGITS)
    nothing = following(nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0, 1.0])))
    assert float(class_weights(nothing, LOGITS[0])[0]) == 0
    for plain in (nn.CrossEntropyLoss(label_smoothing=0.1), lambda z, y: F.cross_entropy(z, y)):
        assert class_weights(plain, LOGITS[0]) is None
        assert is_plain_mean(plain, LOGITS)
    assert not is_plain_mean(nn.CrossEntropyLoss(reduction="sum"), LOGITS)


def test_a_loss_that_couples_samples_has_no_class_weights():
    with pytest.raises(ValueError, match="couples"):
        class_weights(lambda z, y: F.cross_entropy(z, y) + z.mean(0).square().sum(), LOGITS[0])
