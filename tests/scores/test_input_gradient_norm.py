"""The cheap score, against one sample at a time."""

import pytest
import torch
from scored import make_exposure, measure_all, small_network
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.per_sample import separate
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.scores import InputGradientNorm


def one_by_one(gradient_map, batch):
    """‖∂L/∂x‖, with the statistics of the whole batch."""
    alone = separate(
        gradient_map, gradient_map.params, gradient_map.buffers, batch, torch.ones(len(batch))
    )
    norms = []
    for i in range(len(batch)):
        inputs = batch.inputs[i : i + 1].clone().requires_grad_()
        sample = Batch(inputs, batch.targets[i : i + 1])
        loss = alone.gradient_map.loss_value(alone.params, sample, alone.buffers)
        norms.append(float(torch.autograd.grad(loss, inputs)[0].norm()))
    return norms


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_it_is_each_samples_own(batch, batch_size, reduction, batch_norm):
    def loss(logits, targets):
        return F.cross_entropy(logits, targets, reduction=reduction)

    mode = "batch" if batch_norm else "running"
    gradient_map = GradientMap(small_network(batch_norm), loss, mode)
    exposure = make_exposure(gradient_map, batch)
    (found,) = measure_all([InputGradientNorm(batch_size=batch_size)], gradient_map, exposure)
    assert found.values == pytest.approx(one_by_one(gradient_map, batch), rel=1e-5)
    assert found.products == 0


def test_samples_without_a_number_say_why(gradient_map, batch):
    inputs = batch.inputs.clone()
    inputs[1] = torch.nan
    exposure = make_exposure(gradient_map, batch, LocalSchedule(0.1, 1, 3))
    broken = Batch(inputs, batch.targets)
    exposure = make_exposure(gradient_map, batch, LocalSchedule(0.1, 1, 3), defended=broken)
    (found,) = measure_all([InputGradientNorm()], gradient_map, exposure)
    assert [value is None for value in found.values] == [False, True, False, True]
    assert "not finite" in found.notes[1] and "never uses" in found.notes[3]
