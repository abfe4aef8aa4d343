"""Small smooth networks: whole batches from grey, and what pruning left open."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

from flwr_leakage.attacks import AttackJob, DenseGaussNewton, GaussNewton, Grey
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.finish import Finish
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.dense_gauss_newton import _Run
from flwr_leakage.attacks.problem import pose
from flwr_leakage.defenses import GaussianNoise, GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel


class Kinked(nn.Module):
    """A ReLU of several calls."""

    def forward(self, x):
        return (x + x.abs()) / 2


def case(spec, images, defense=None, num_steps=1, model=None, targets=None):
    batch = Batch(images, torch.arange(len(images)) % 4 if targets is None else targets)
    gradient_map = GradientMap(tiny_network() if model is None else model)
    seen = observe(gradient_map, batch, LocalSchedule(0.1, num_steps, len(images)))
    if defense is not None:
        update = defense.on_update(seen.update, Reproducible.from_seed(0))
        seen = replace(seen, update=update)
    return AttackJob(gradient_map, spec, [seen], ThreatModel()), batch


def error(found, batch):
    return float((found.inputs - batch.inputs).square().mean().sqrt())


@pytest.fixture
def blobs(spec):
    """Images of low frequencies, as those of the prior are."""
    coarse = torch.rand(2, spec.shape[0], 3, 3, generator=torch.Generator().manual_seed(3))
    images = nn.functional.interpolate(coarse, spec.shape[1:], mode="bilinear", align_corners=True)
    return spec.normalize(images)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (2, 1), (1, 3)])
def test_smooth_networks_are_solved_from_grey(spec, blobs, count, steps):
    job, batch = case(spec, blobs[:count], num_steps=steps)
    (found,) = DenseGaussNewton()(job)
    assert error(found.batch, batch) < 1e-3
    assert found.objective < 1e-12
    assert found.stats["iterations"] <= 20


def test_what_pruning_left_open_is_filled_by_the_prior(spec, blobs):
    job, batch = case(spec, blobs[:1], GradientPruning(0.9))
    (found,) = DenseGaussNewton()(job)
    grey = Batch(torch.zeros_like(batch.inputs), batch.targets)
    assert error(found.batch, batch) < 0.3 * error(grey, batch)
    problem = pose(job.gradient_map, spec, job.observations[0], job.threat)
    evidence = Evidence.of(problem, 1e-7)
    residual = evidence.likelihood.residual(evidence.gradient(found.batch))
    kept = evidence.likelihood.observed != 0
    assert int(kept.sum()) < 0.15 * len(kept)
    excess = evidence.likelihood.excess(residual)
    assert float(excess.norm()) < 1e-4 * float(evidence.likelihood.observed.norm())


def test_an_update_with_noise_is_met_to_its_noise(spec, blobs):
    job, _ = case(spec, blobs[:1], GaussianNoise(1e-3))
    (found,) = DenseGaussNewton()(job)
    problem = pose(job.gradient_map, spec, job.observations[0], job.threat)
    misfit = Evidence.of(problem, 1e-7).judge(found.batch).misfit
    assert 0.5 < misfit < 1.3
    assert found.stats["misfit"] == pytest.approx(misfit, rel=0.1)


def test_it_goes_on_from_a_candidate(spec, blobs):
    job, batch = case(spec, blobs[:1])
    near = Batch(batch.inputs + 0.01, batch.targets)
    found = Finish(DenseGaussNewton())(job, near)
    assert found.stats["iterations"] < DenseGaussNewton()(job)[0].stats["iterations"]
    assert error(found.batch, batch) < 1e-3


class NoLabels:
    """Labels that can not be inferred."""

    def __call__(self, problem, generator):
        raise ValueError("no labels")


class AlikeFirst:
    """A start from which samples of one label stay alike; then others."""

    def __call__(self, spec, num_samples, restart, generator):
        alike = torch.zeros(num_samples, *spec.shape)
        return alike if restart == 0 else Grey()(spec, num_samples, restart, generator)


def test_from_a_start_that_leads_nowhere_it_turns_to_another(spec, blobs):
    job, _ = case(spec, blobs, targets=torch.tensor([1, 1]))
    (found,) = DenseGaussNewton(initialisation=AlikeFirst())(job)
    assert found.stats["starts"] > 1
    (once,) = DenseGaussNewton(initialisation=AlikeFirst(), starts=1)(job)
    assert once.stats["stage"] == "led nowhere from 1 start"
    assert found.objective < once.objective / 5
    alike = Batch(torch.zeros_like(blobs), torch.tensor([1, 1]))
    assert Finish(DenseGaussNewton())(job, alike).stats["starts"] == 1  # a candidate is one start


def test_a_batch_begins_where_another_attack_ended(spec, blobs):
    job, batch = case(spec, blobs)
    ahead = GaussNewton((Annealing(blur=0.0, factor=0.5),), products=300)
    near = ahead(job)[0]
    attack = DenseGaussNewton(ahead=ahead)
    (found,) = attack(job)
    assert error(found.batch, batch) < 1e-3 < error(near.batch, batch)
    assert found.stats["iterations"] < DenseGaussNewton()(job)[0].stats["iterations"]
    assert found.stats["begun"] == "where the attack ahead ended"
    blind = DenseGaussNewton(ahead=replace(ahead, labels=NoLabels()))
    assert "as the attack ahead refused: no labels" in blind(job)[0].stats["begun"]
    single, _ = case(spec, blobs[:1])
    alone, plain = (each(single)[0].stats["iterations"] for each in (attack, DenseGaussNewton()))
    assert alone == plain  # one image has no use of it
    shift = Finish(attack)(job, Batch(batch.inputs + 0.01, batch.targets))
    assert shift.stats["iterations"] <= 3 < DenseGaussNewton()(job)[0].stats["iterations"]


def test_a_matrix_serves_the_steps_that_follow(spec, blobs):
    job, batch = case(spec, blobs)
    (found,) = DenseGaussNewton()(job)
    assert found.stats["matrices"] < found.stats["iterations"]
    assert error(found.batch, batch) < 1e-3


def test_what_does_not_fit_is_refused(spec, blobs):
    relu = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))
    job, _ = case(spec, blobs[:1], model=relu)
    assert "must be smooth" in DenseGaussNewton()(job)[0].error
    hand = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), Kinked(), nn.Linear(20, 4))
    job, _ = case(spec, blobs[:1], model=hand)
    assert "derivative jumps" in DenseGaussNewton()(job)[0].error
    job, _ = case(spec, blobs[:1])
    assert "10 entries" in DenseGaussNewton(max_entries=10)(job)[0].error
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        DenseGaussNewton(steps=0)
    with pytest.raises(ValueError, match="starts must be at least 1, got 0"):
        DenseGaussNewton(starts=0)
    with pytest.raises(ValueError, match=r"model_error must lie in \(0, 1\], got 0"):
        DenseGaussNewton(model_error=0.0)


def test_it_says_so_if_the_budget_does_not_last_for_the_test_of_smoothness(spec, blobs):
    job, _ = case(spec, blobs[:1])
    (found,) = DenseGaussNewton()(replace(job, max_seconds=1e-9))
    assert found.stats["stopped"] == "budget" and found.batch is None
    assert "the test for kinks takes about" in found.error


def test_where_few_steps_fit_into_the_budget_others_get_the_time(spec, blobs, monkeypatch):
    job, _ = case(spec, blobs)
    looks = count()
    clock = SimpleNamespace(process_time=lambda: float(next(looks)))  # a second at each look
    monkeypatch.setattr("flwr_leakage.attacks.budget.time", clock)
    module = "flwr_leakage.attacks.inversion.dense_gauss_newton"
    monkeypatch.setattr(f"{module}.is_rough", lambda *_: False)  # whose passes would be 99 looks

    def said(max_seconds):
        return DenseGaussNewton()(replace(job, max_seconds=max_seconds))[0].stats

    (first,) = DenseGaussNewton(steps=1)(replace(job, max_seconds=1e6))
    short = said(1.2 * first.stats["cpu_seconds"])
    assert (short["iterations"], short["stopped"]) == (1, "budget")
    assert "another step does not fit" in short["stage"]
    assert said(1e6)["iterations"] > 1


def test_a_step_that_keeps_its_matrix_needs_no_time_for_one(spec, blobs, monkeypatch):
    job, _ = case(spec, blobs[:1])
    spent = [0.0]
    clock = SimpleNamespace(process_time=lambda: spent[0])
    monkeypatch.setattr("flwr_leakage.attacks.budget.time", clock)
    make = _Run._matrix

    def slow(*arguments):
        spent[0] += 100.0
        return make(*arguments)

    monkeypatch.setattr(_Run, "_matrix", slow)
    free = DenseGaussNewton()(job)[0].stats
    stats = DenseGaussNewton()(replace(job, max_seconds=199.0))[0].stats
    assert stats["matrices"] == 1 < stats["iterations"] <= free["iterations"]
