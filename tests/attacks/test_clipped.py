"""Entries that a filter clipped are seen in an update, and nowhere else."""

import pytest
import torch
from torch import nn

from flwr_leakage.attacks import Analytic, AttackJob
from flwr_leakage.attacks.clipped import clipped_entries, without_clipped
from flwr_leakage.defenses import PercentilePrivacy, SignSGD
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import psnr
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Secure
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)

SPEC, SCHEDULE = InputSpec((1, 8, 8), 4), LocalSchedule(0.1)


def made(images, classes=4, defense=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
    gradient_map = GradientMap(model)
    batch = Batch(images, torch.tensor([1]))
    gradient = gradient_map(gradient_map.params, batch)
    delta = {name: -0.1 * value for name, value in gradient.items()}
    update = Update(delta, {}, SCHEDULE, 1)
    if defense is not None:
        update = defense.on_update(update, Secure())
    return gradient_map, gradient, update


def clipped(gradient):
    return torch.cat([at.reshape(-1) for at in clipped_entries(gradient).values()])


def count(gradient):
    return int(clipped(gradient).sum())


def draw(seed=0):
    return torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_clipped_entries_are_found_and_left_out():
    _, gradient, update = made(draw(), defense=PercentilePrivacy(10, 0.005))
    sent = update.pseudo_gradient()
    truly = ravel(gradient).abs() > 0.05
    assert int(truly.sum()) > 10
    assert torch.equal(clipped(sent), truly)
    left = ravel(without_clipped(sent))
    assert torch.equal(left[~truly], ravel(sent)[~truly]) and not left[truly].any()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("values", [(0, 1), (-1, 1)])
def test_saturated_images_and_opposite_errors_are_no_clip(classes, values):
    images = torch.where(draw() > 0.5, *map(float, values))
    _, gradient, _ = made(images, classes)
    assert count(gradient) == 0
    assert without_clipped(gradient) is gradient


def test_signs_are_no_clip():
    _, _, update = made(draw(), defense=SignSGD(0.01))
    assert count(update.pseudo_gradient()) == 0


def test_an_image_behind_a_clip_is_recovered_by_what_was_not_clipped():
    gradient_map, _, update = made(draw(), defense=PercentilePrivacy(10, 0.005))
    seen = Observation(1, 0, gradient_map.params, {}, update)
    (found,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert float(psnr(found.batch.inputs, draw())) > 80
