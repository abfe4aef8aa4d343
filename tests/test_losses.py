"""Losses in the precision of the logits."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.losses import FollowingLoss, NextToken, following, scalar
from flwr_leakage.per_sample.cross_entropy import stable

LOGITS = torch.linspace(-2, 1, 12, dtype=torch.float64).reshape(3, 4)
TARGETS = torch.tensor([0, 3, 1])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0])


class Focal(nn.Module):
    """A module that holds another."""

    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=WEIGHT)

    def forward(self, logits, targets):
        return self.inner(2 * logits, targets)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=WEIGHT), Focal(), partial(F.cross_entropy, weight=WEIGHT)],
)
def test_weights_follow_the_logits(loss):
    found = following(loss)
    assert isinstance(found, FollowingLoss)
    single = loss(LOGITS.float(), TARGETS)
    assert torch.equal(found(LOGITS.float(), TARGETS), single)
    torch.testing.assert_close(found(LOGITS, TARGETS), single.double(), rtol=1e-6, atol=0)
    slope = torch.func.vmap(torch.func.grad(lambda z, y: found(z[None], y[None])))(LOGITS, TARGETS)
    assert slope.dtype == torch.float64 and bool(slope.any())


def test_losses_without_tensors_stay_themselves():
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy)):
        assert following(loss) is loss
    kept = following(nn.CrossEntropyLoss(weight=WEIGHT))
    assert following(kept) is kept
    assert torch.equal(stable(kept).weight, WEIGHT)


def test_what_is_no_loss_is_refused():
    with pytest.raises(ValueError, match=r"function \(logits, targets\) .* got 'cross_entropy'"):
        inspect.unwrap(following)("cross_entropy")  # without the tests' type checker
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \(3,\)"):
        scalar(F.cross_entropy(LOGITS, TARGETS, reduction="none"))


def test_the_next_token_is_compared_with_the_logits_before_it():
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[3, 1, 2, 5], [4, 6, 0, 0]])
    told = logits.log_softmax(-1)
    every = [told[b, t - 1, ids[b, t]] for b in range(2) for t in range(1, 4)]
    assert float(NextToken()(logits, ids)) == pytest.approx(-float(sum(every)) / 6)
    own = [each for each, token in zip(every, ids[:, 1:].flatten(), strict=True) if token]
    assert float(NextToken(0)(logits, ids)) == pytest.approx(-float(sum(own)) / 4)
