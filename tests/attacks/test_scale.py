"""A client that clips its update hides nothing by it: the factor is told by the update itself."""

import pytest
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import AttackJob, ExactBatch, FeatureMatching, Strongest, pose
from flwr_leakage.attacks.exact.batch_masks import MaskColumns
from flwr_leakage.attacks.exact.batch_search import BatchSearch, SearchSettings
from flwr_leakage.attacks.one_by_one import unscaled
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def convnet(act=nn.Sigmoid):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 3, padding=1, stride=2), act(), nn.Conv2d(10, 8, 3, padding=1), act()),
        *(nn.Flatten(), nn.Linear(128, 4)),
    )


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU()),
        nn.Linear(60, 4),
    )


def job(network, images, factor, noise=0.0, steps=1, labels=None):
    """An attack job on an update that is ``factor`` times the plain one, with noise of its size."""
    gradient_map = GradientMap(network)
    labels = torch.arange(len(images)) % 4 if labels is None else labels
    seen = observe(gradient_map, Batch(images, labels), LocalSchedule(1.0, steps, len(images)))
    stream = torch.Generator().manual_seed(1)
    for value in seen.update.delta.values():
        size = noise * float(value.norm()) / value.numel() ** 0.5
        value += size * torch.randn(value.shape, generator=stream)
        value *= factor
    return AttackJob(gradient_map, SPEC, [seen], ThreatModel())


def posed(given):
    return pose(given.gradient_map, SPEC, given.observations[0], given.threat)


@pytest.mark.parametrize("factor", [1e-3, 0.3, 0.9, 2.0])
@pytest.mark.parametrize("act", [nn.Sigmoid, nn.ReLU])
def test_the_factor_of_one_sample_is_told_by_the_last_layer(images, act, factor):
    problem = unscaled(posed(job(convnet(act), images[:1], factor)))
    assert problem.scale == pytest.approx(factor, rel=1e-4)
    plain = posed(job(convnet(act), images[:1], 1.0))
    for name, value in plain.gradient.items():
        torch.testing.assert_close(problem.gradient[name], value, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1e-2, 0.1, 1.0])
def test_a_plain_update_is_left_as_it_is_whatever_its_noise(images, noise):
    problem = posed(job(convnet(), images[:1], 1.0, noise))
    assert unscaled(problem) is problem


def test_the_factor_is_told_through_noise_that_leaves_it_plain(images):
    problem = unscaled(posed(job(convnet(), images[:1], 0.2, noise=1e-2)))
    assert problem.scale == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("case", ["pruned", "steps", "two samples", "no bias", "frozen"])
def test_nothing_is_divided_where_nothing_tells_the_factor(images, case):
    network = convnet()
    if case == "no bias":
        network[-1].bias = None
    if case == "frozen":
        network[-1].requires_grad_(False)
    images = images[: 2 if case == "two samples" else 1]
    given = job(network, images, 0.3, steps=3 if case == "steps" else 1)
    if case == "pruned":
        for value in given.observations[0].update.delta.values():
            value[value.abs() < value.abs().median()] = 0
    problem = posed(given)
    assert unscaled(problem) is problem


def test_a_clipped_update_is_matched_as_exactly_as_a_plain_one(images):
    (found,) = FeatureMatching()(job(convnet(), images[:1], 0.3))
    assert found.stats["scale"] == pytest.approx(0.3, rel=1e-4)
    torch.testing.assert_close(found.batch.inputs, images[:1], atol=0.02, rtol=0)


@pytest.mark.parametrize("factor", [0.05, 0.9])
def test_the_samples_of_a_clipped_batch_tell_its_factor(images, factor):
    given = job(mlp(), images[:4], factor)
    (found,) = ExactBatch()(given)
    assert found.stats["scale"] == pytest.approx(factor, rel=1e-3)
    assert found.stats["verdicts"] == ("proven",) * 4
    distances = torch.cdist(found.batch.inputs.flatten(1), images[:4].flatten(1))
    assert float(distances.amin(0).max()) < 1e-2
    (chosen,) = Strongest({"exact_batch": ExactBatch()})(given)
    assert chosen.objective < 1e-8  # once the factor is told, the gradient is met
    assert f"scaled by {factor:.3g}" in chosen.summary


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "proven"), (2.0, "plausible")])
def test_features_of_an_update_larger_than_a_step_makes_it_are_not_proven(images, factor, verdict):
    # Two steps that are told as one give twice the update, and means of features over both.
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 4)),
    )
    (found,) = ExactBatch()(job(network, images[:3], factor))
    assert found.batch is None and found.stats["scale"] == pytest.approx(factor, rel=1e-3)
    assert verdict in found.stats["verdicts"]
    assert (factor < 1) is ("proven" in found.stats["verdicts"])


def test_a_plain_batch_has_no_factor(images):
    (found,) = ExactBatch()(job(mlp(), images[:4], 1.0))
    assert "scale" not in found.stats and found.stats["verdicts"] == ("proven",) * 4


def test_a_factor_that_candidates_tell_by_chance_ends_no_search(images, monkeypatch):
    """As two candidates of a mixture did, so that no sample of a batch of 32 was found."""
    told = iter([0.5])  # a search for samples under a wrong factor ends by its time limit
    monkeypatch.setattr(BatchSearch, "told_scale", property(lambda self: next(told, None)))
    attack = ExactBatch(SearchSettings(max_seconds=2.0))
    (found,) = attack(job(mlp(), images[:4], 1.0))
    assert next(told, None) is None  # it was asked for, and its factor was tried
    assert "scale" not in found.stats and found.stats["verdicts"] == ("proven",) * 4


def test_a_factor_is_tried_though_the_samples_that_told_it_are_dropped(images, monkeypatch):
    """As of 12 images, whose first two candidates agreed on a wrong factor and were not kept."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 4))
    told, settled, dropped = iter([1.01]), MaskColumns.settled, []

    def drop_at_first(self, found):
        dropped.append(len(found))
        return [] if len(dropped) == 1 else settled(self, found)

    monkeypatch.setattr(BatchSearch, "told_scale", property(lambda self: next(told, None)))
    monkeypatch.setattr(MaskColumns, "settled", drop_at_first)
    (found,) = ExactBatch(SearchSettings(max_seconds=2.0))(job(network, images, 1.0))
    assert len(dropped) > 1
    assert found.stats["verdicts"] == ("proven",) * 6
