"""Dense derivatives of an update, and the steps made of them where masks are wrong."""

from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

from flwr_leakage.attacks import LBFGS, AttackJob, Euclidean, GradientInversion, pose
from flwr_leakage.attacks.finish import Finish
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.inversion.least_absolute import LeastAbsolute
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel


def network(activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), activation(), nn.Conv2d(8, 8, 3, padding=1), activation(),
        nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip


def case(spec, images, model, schedule):
    batch = Batch(images, torch.arange(len(images)) % 4)
    gradient_map = GradientMap(model)
    seen = observe(gradient_map, batch, schedule)
    return AttackJob(gradient_map, spec, [seen], ThreatModel()), batch


def erring(batch, size):
    noise = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(1))
    return Batch(batch.inputs + size * noise, batch.targets)


def error(found, batch):
    return float((found.inputs - batch.inputs).square().mean().sqrt())


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        (LocalSchedule(0.1, batch_size=3), tiny_network()),
        (LocalSchedule(0.1, 2, 3), tiny_network()),
        (
            LocalSchedule(0.1, batch_size=3),
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4)),
        ),
    ],
    ids=["one step", "two steps", "batch statistics"],
)
def test_columns_are_derivatives_of_the_whole_update(spec, images, schedule, model):
    job, batch = case(spec, images[:3], model, schedule)
    problem = pose(job.gradient_map, spec, job.observations[0], job.threat).to(torch.float64)
    jacobian = Jacobian(problem, batch.targets, 10**8)
    inputs = batch.inputs.double()
    found = jacobian.transposed(inputs)
    direction = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(2)).double()
    there, back = (jacobian.gradient(inputs + sign * 1e-5 * direction) for sign in (1, -1))
    torch.testing.assert_close(
        direction.flatten() @ found, (there - back) / 2e-5, atol=1e-7, rtol=1e-4
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_few_wrong_masks_are_set_right(spec, images, steps):
    job, batch = case(spec, images[:1], network(), LocalSchedule(0.05, steps))
    start = erring(batch, 0.02)
    least_squares = Finish(GradientInversion(Euclidean(), optimizer=LBFGS(300, tolerance=1e-12)))
    found = Finish(LeastAbsolute())(job, start)
    assert error(found.batch, batch) < 1e-3
    assert error(found.batch, batch) < 0.1 * error(least_squares(job, start).batch, batch)
    assert found.objective < 1e-10


def test_entries_that_were_pruned_are_met_within_their_bounds(spec, images):
    job, batch = case(spec, images[:1], network(), LocalSchedule(0.05))
    seen = job.observations[0]
    pruned = GradientPruning(0.8).on_update(seen.update, Reproducible.from_seed(0))
    job = replace(job, observations=[replace(seen, update=pruned)])
    start = erring(batch, 0.02)
    found = Finish(LeastAbsolute())(job, start)
    assert error(found.batch, batch) < 0.1 * error(start, batch)


def test_what_does_not_fit_is_refused(spec, images):
    job, _ = case(spec, images[:1], network(nn.Tanh), LocalSchedule(0.05))
    assert "is smooth" in LeastAbsolute()(job)[0].error
    job, _ = case(spec, images[:1], network(), LocalSchedule(0.05))
    assert "10 entries" in LeastAbsolute(max_entries=10)(job)[0].error
    for name in ("steps",):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            LeastAbsolute(**{name: 0})


def test_it_ends_with_its_start_once_the_budget_is_spent(spec, images):
    job, _ = case(spec, images[:1], network(), LocalSchedule(0.05))
    (found,) = LeastAbsolute()(replace(job, max_seconds=1e-9))
    assert found.stats["stopped"] == "budget" and found.stats["iterations"] == 0
    assert bool(torch.isfinite(found.batch.inputs).all())
