"""An unknown normalisation is read off the answer, or chosen by the fit."""

from dataclasses import replace

import pytest
import torch
from attacked import observe
from portfolio import Answering
from torch import nn

import flwr_leakage
from flwr_leakage.attacks import LBFGS, Analytic, AttackJob, GradientInversion, Strongest
from flwr_leakage.attacks.by_fit import by_fit
from flwr_leakage.attacks.one_by_one import NORMALISATION, PROVEN_INPUTS
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Reconstruction, ThreatModel

HALF = InputSpec((1, 8, 8), 4, (0.5,), (0.5,))
MNIST = InputSpec((1, 8, 8), 4, (0.1307,), (0.3081,))
UNKNOWN = InputSpec((1, 8, 8), 4, known=False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4)).eval()


def drawn(spec, levels=255, count=1):
    pixels = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    pixels[:, 0, 0, :2] = torch.tensor([0.0, 1.0])
    pixels = (pixels * levels).round() / levels if levels else pixels
    return Batch(spec.normalize(pixels), torch.arange(count) % 4)


def job(truth, **settings):
    seen = [observe(GradientMap(network()), one, LocalSchedule(0.1)) for one in truth]
    return AttackJob(GradientMap(network()), UNKNOWN, seen, ThreatModel(), **settings)


class Noted:
    """An attack that notes under which specs it was run."""

    def __init__(self, attack):
        self.attack, self.specs, self.seconds = attack, [], []

    def __call__(self, job, progress=None):
        self.specs.append(job.spec)
        self.seconds.append(job.max_seconds)
        return self.attack(job, progress)


@pytest.mark.parametrize("own", [HALF, MNIST])
def test_levels_of_pixels_show_the_normalisation_at_once(own):
    truth, attack = drawn(own), Noted(Analytic())
    (found,) = by_fit(attack, job([truth]))
    assert len(attack.specs) == 1 and not attack.specs[0].box
    assert (found.spec, found.stats[NORMALISATION]) == (own, "read off")
    assert found.stats["verdicts"] == ("proven",)
    torch.testing.assert_close(found.batch.inputs, truth.inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("own", [HALF, MNIST])
def test_interpolated_images_are_those_of_the_narrowest_box_and_not_proven(own):
    truth = drawn(own, levels=0)
    (found,) = by_fit(Analytic(), job([truth]))
    assert (found.spec, found.stats[NORMALISATION]) == (own, "by fit")
    assert (found.stats["verdicts"], found.stats[PROVEN_INPUTS]) == (("plausible",), 1)
    assert "not proven" in found.stats["stage"]
    torch.testing.assert_close(found.batch.inputs, truth.inputs, atol=1e-4, rtol=0)


def test_targets_that_show_nothing_are_decided_together():
    whole, dull = drawn(MNIST, levels=0), drawn(MNIST, levels=0)
    dull = Batch(dull.inputs.clamp(-0.4, 0.9), dull.targets)  # it alone might be by 0.5
    (alone,) = by_fit(Analytic(), job([dull]))
    assert alone.spec == HALF
    assert [found.spec for found in by_fit(Analytic(), job([dull, whole]))] == [MNIST, MNIST]


def test_where_no_answer_meets_the_gradient_each_normalisation_is_tried_in_its_share_of_time():
    truth = drawn(HALF, levels=0)

    def near(job, progress=None):
        """An attack that is the nearer the righter its normalisation is."""
        off = abs(job.spec.mean[0] - 0.5) + abs(job.spec.std[0] - 0.5)
        batch = Batch(truth.inputs * (1 + 0.02 + off), truth.targets)
        return [Reconstruction(batch, 0.0)]

    attack = Noted(near)
    (found,) = by_fit(attack, job([truth], max_seconds=60.0))
    assert found.spec == HALF and found.stats[NORMALISATION] == "by fit"
    assert [spec.box for spec in attack.specs] == [False, *[True] * 6]
    assert attack.seconds[0] <= 30 / 7 and max(attack.seconds) <= 30


def test_all_normalisations_share_the_portfolios_own_limit():
    grey = Batch(torch.full((1, 1, 8, 8), 0.1), torch.tensor([0]))
    one = Answering(grey)
    by_fit(Strongest({"one": one}, max_seconds=6.0), job([drawn(MNIST, levels=0)]))
    assert len(one.limits) > 2 and sum(one.limits[:-1]) <= 6.0
    assert max(one.limits) <= 6.0


def test_the_progress_counts_the_observations_and_not_the_tries():
    told = []
    truths = [drawn(MNIST, levels=0), drawn(HALF, levels=0)]
    by_fit(GradientInversion(optimizer=LBFGS(3)), job(truths), told.append)
    assert {now.total for now in told} == {2}
    done = [now.done for now in told]
    assert done == sorted(done) and max(done) < 2


def test_a_known_normalisation_is_not_questioned():
    attack = Noted(Analytic())
    known = replace(job([drawn(HALF)]), spec=HALF)
    (found,) = by_fit(attack, known)
    assert attack.specs == [HALF] and found.spec is None


def test_an_attack_that_refuses_is_asked_under_each_and_refuses():
    def refusing(job, progress=None):
        return [Reconstruction(None, float("nan"), error="no")]

    (found,) = by_fit(refusing, job([drawn(HALF)]))
    assert (found.batch, found.error, found.spec) == (None, "no", None)


def test_the_one_call_takes_an_unknown_normalisation():
    truth, model = drawn(HALF), network()
    loss = nn.functional.cross_entropy(model(truth.inputs), truth.targets)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    found = flwr_leakage.attack(model, gradient, spec=UNKNOWN, preset="analytic")
    assert found.spec == HALF
    grey = Answering(Batch(torch.zeros(1, 1, 8, 8), torch.tensor([0])), {})
    found = flwr_leakage.attack(model, gradient, spec=HALF, preset=grey)
    assert found.spec is None
