"""The cross-entropy that does not cancel: torch's own values, and right digits when confident."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.func import grad, hessian
from torch.nn import functional as F

from flwr_leakage.per_sample.cross_entropy import StableCrossEntropy, stable

WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1])
INDICES = torch.tensor([0, 3, 3, 1, 2])


def logits(margin: float = 0.0) -> torch.Tensor:
    drawn = 2 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    return drawn + margin * F.one_hot(INDICES, 4)


def shares() -> torch.Tensor:
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize(
    ("weight", "reduction", "smoothing"),
    list(product((None, WEIGHT.double()), ("mean", "sum"), (0.0, 0.2))),
)
@pytest.mark.parametrize("targets", [INDICES, F.one_hot(INDICES, 4).double(), shares()])
def test_it_is_torch_s_with_all_its_options_to_the_second_derivative(
    weight, reduction, smoothing, targets
):
    ours = StableCrossEntropy(weight, -100, reduction, smoothing)
    theirs = partial(F.cross_entropy, weight=weight, reduction=reduction, label_smoothing=smoothing)
    for derive in (lambda f: f, grad, hessian):
        found, expected = (
            derive(lambda z, loss=loss: loss(z, targets))(logits()) for loss in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_ignored_targets_count_for_nothing():
    for options in ({"weight": WEIGHT.double()}, {}):
        losses = (
            kind(ignore_index=3, **options) for kind in (StableCrossEntropy, nn.CrossEntropyLoss)
        )
        found, expected = (grad(lambda z, loss=loss: loss(z, INDICES))(logits()) for loss in losses)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margin", [-100.0, -20.0, 0.0, 20.0, 35.0, 39.0])
@pytest.mark.parametrize("soft", [False, True])
def test_float32_keeps_its_digits_however_sure_the_model_is(margin, soft):
    targets = F.one_hot(INDICES, 4).double() if soft else INDICES
    for derive in (grad, hessian):
        exact = derive(lambda z: StableCrossEntropy()(z, targets))(logits(margin))
        narrow = targets.float() if soft else targets
        found = derive(lambda z, t=narrow: StableCrossEntropy()(z, t))(logits(margin).float())
        assert float((found - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_left_derivatives_are_zero_and_no_others(dtype):
    for margin in (50.0, 80.0, 400.0, 1000.0):
        z = logits(margin).to(dtype)
        for derive in (grad, hessian):
            found = derive(lambda z: StableCrossEntropy()(z, INDICES))(z)
            assert float(found.abs().max()) < 1e-17


def test_torch_s_own_loses_them():
    """What this is for; with it the float64 values above are right, too."""
    exact = grad(lambda z: StableCrossEntropy()(z, INDICES))(logits(20.0))
    torch.testing.assert_close(
        exact, grad(lambda z: F.cross_entropy(z, INDICES))(logits(20.0)), rtol=1e-5, atol=0
    )
    lost = grad(lambda z: F.cross_entropy(z, INDICES))(logits(20.0).float())
    assert float((lost - exact).norm() / exact.norm()) > 0.1


def test_two_equal_logits_are_no_special_point():
    slope = grad(lambda z: StableCrossEntropy()(z, torch.tensor([0])))(torch.zeros(1, 2))
    torch.testing.assert_close(slope, torch.tensor([[-0.5, 0.5]]))


def test_it_is_recognised_under_all_its_names():
    assert stable(F.cross_entropy) == StableCrossEntropy()
    assert stable(nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")) == StableCrossEntropy(
        None, -100, "sum", 0.1
    )
    assert stable(partial(F.cross_entropy, label_smoothing=0.1)) == StableCrossEntropy(
        label_smoothing=0.1
    )
    assert stable(StableCrossEntropy(ignore_index=3)) == StableCrossEntropy(ignore_index=3)

    class Own(nn.CrossEntropyLoss):
        pass

    for other in (F.mse_loss, Own(), nn.CrossEntropyLoss(reduction="none"), lambda z, y: z.sum()):
        assert stable(other) is None
