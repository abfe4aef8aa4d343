from dataclasses import replace

import pytest
import scipy.stats
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import Analytic, AttackJob
from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact import pruned_layers
from flwr_leakage.attacks.exact.pruned_layers import PrunedLayer, PrunedPass, fill_unseen, truncated
from flwr_leakage.attacks.network.linear import input_orders
from flwr_leakage.attacks.problem import pose
from flwr_leakage.defenses import GaussianNoise, GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def image():
    """Bright on dark, smooth."""
    places = torch.linspace(-1, 1, 8)
    squares = places[:, None].square() + places.square()
    return SPEC.normalize(0.15 + 0.7 * torch.exp(-3 * squares)).reshape(1, *SPEC.shape)


def pruned(share, widths=(120, 60), seed=0, images=None):
    """A network, and what is left of an image's update."""
    torch.manual_seed(seed)
    layers, inputs = [nn.Flatten()], 64
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    gradient_map = GradientMap(nn.Sequential(*layers, nn.Linear(inputs, 4)).eval())
    images = image() if images is None else images
    truth = Batch(images, torch.arange(len(images)) % 4)
    seen = observe(gradient_map, truth, LocalSchedule(1.0, 1, len(images)))
    update = GradientPruning(share).on_update(seen.update, Reproducible.from_seed(seed))
    return gradient_map, replace(seen, update=update)


def read(gradient_map, seen):
    problem = pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)
    use, order = input_orders(problem)[0]
    return order, PrunedPass.of(problem, use, torch.Generator().manual_seed(0))


def outputs(gradient_map):
    """Of each linear layer but the last, for the image."""
    value = image().flatten().double()
    found = []
    for number in (1, 3):
        weight, bias = (gradient_map.params[f"{number}.{name}"] for name in ("weight", "bias"))
        found.append(weight.double() @ value + bias)
        value = found[-1].clamp_min(0)
    return found


@pytest.mark.parametrize("seed", range(1, 6))
def test_what_was_kept_tells_inputs_errors_and_units(seed):
    gradient_map, seen = pruned(0.8, seed=seed)
    _, found = read(gradient_map, seen)
    assert len(found.layers) == 3
    truths = [image().flatten().double(), *(z.clamp_min(0) for z in outputs(gradient_map))]
    for layer, truth in zip(found.layers, truths, strict=True):
        assert 0 < int(layer.seen.sum()) < len(truth)
        torch.testing.assert_close(layer.inputs[layer.seen], truth[layer.seen], atol=1e-5, rtol=0)
        assert truth[~layer.seen].abs().max() <= layer.bound * (1 + 1e-5)
    first = found.layers[0]
    kept = (seen.update.delta["1.bias"] != 0).sum()
    assert first.has_error.sum() > kept  # rows tell errors that the bias does not
    for known, truth in zip(found.features, outputs(gradient_map), strict=True):
        assert not (known.mask.on & known.mask.off).any()
        assert (truth[known.mask.on] > 0).all()
        assert (truth[known.mask.off] <= 0).all()
        gaps = (truth.clamp_min(0) - known.values).abs()
        assert (gaps <= known.bounds * (1 + 1e-5) + 1e-5).all()
    assert sum(int(known.mask.off.sum()) for known in found.features) > 10


def test_pixels_of_which_nothing_is_kept_are_told_by_the_layers_behind():
    gradient_map, seen = pruned(0.8)
    order, found = read(gradient_map, seen)
    unseen = ~found.layers[0].seen
    errors = {}
    for name, layers in (("first layer", found.layers[:1]), ("all", found.layers)):
        filled = fill_unseen(SPEC, order, PrunedPass(layers))
        errors[name] = (filled.inputs - image().flatten())[unseen].square().mean().sqrt()
        assert errors[name] < 4 * filled.deviation
    assert errors["all"] < 0.02 * errors["first layer"]
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    torch.testing.assert_close(result.batch.inputs, image(), atol=2e-3, rtol=0)
    assert "by 2 layers behind and the prior" in str(result.stats["stage"])
    off = (SPEC.denormalize(result.batch.inputs) - SPEC.denormalize(image())).flatten()[unseen]
    assert off.square().mean().sqrt() < 4 * result.stats["posterior_deviation"]


def test_a_spent_budget_ends_the_turns():
    gradient_map, seen = pruned(0.8)
    order, found = read(gradient_map, seen)
    spent, whole = (fill_unseen(SPEC, order, found, each) for each in (Budget.of(0.0), UNLIMITED))
    assert spent.stopped
    assert not whole.stopped
    assert spent.deviation > whole.deviation
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], ThreatModel(), max_seconds=1e-9))
    assert result.stats["stopped"] == "budget"
    assert "posterior_deviation" not in result.stats  # it is that of all turns


@pytest.mark.parametrize("reason", ["too many", "not positive definite"])
def test_what_the_layers_behind_cannot_tell_is_filled_in_by_the_prior_and_said(reason, monkeypatch):
    gradient_map, seen = pruned(0.8)
    if reason == "too many":
        monkeypatch.setattr(pruned_layers, "MOST_ENTRIES", 1)
    else:
        indefinite = -torch.eye(2)
        monkeypatch.setattr(
            pruned_layers, "_given_seen", lambda *_: torch.linalg.cholesky(indefinite)
        )
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert "by the prior alone" in str(result.stats["stage"])
    assert reason in str(result.stats["stage"])
    assert (result.batch.inputs - image()).square().mean() < 0.02


def test_noise_of_what_was_kept_shows_and_is_allowed_for():
    gradient_map, seen = pruned(0.0)
    noised = GaussianNoise(1e-2, relative_to="norm").on_update(
        seen.update, Reproducible.from_seed(0)
    )
    update = GradientPruning(0.8).on_update(noised, Reproducible.from_seed(0))
    order, found = read(gradient_map, replace(seen, update=update))
    truth = image().flatten().double()
    first = found.layers[0]
    errors = (first.inputs - truth)[first.seen]
    assert 0.5 < (errors / first.deviations[first.seen]).square().mean().sqrt() < 2
    for known, outs in zip(found.features, outputs(gradient_map), strict=True):
        assert (outs[known.mask.on] > 0).all()
        assert (outs[known.mask.off] <= 0).all()
    filled = fill_unseen(SPEC, order, found)
    missed = (filled.inputs - truth)[~order.moved(first.seen)].square().mean().sqrt()
    assert 0.3 * filled.deviation < missed < 2 * filled.deviation


def test_zeros_that_are_no_small_entries_bound_nothing():
    gradient_map, seen = pruned(0.0)
    generator = torch.Generator().manual_seed(0)
    delta = dict(seen.update.delta)
    dropped = torch.rand(delta["1.weight"].shape, generator=generator) < 0.5
    dropped[:, :8] = True  # a row of the image of which nothing is kept
    delta["1.weight"] = delta["1.weight"].masked_fill(dropped, 0)
    seen = replace(seen, update=replace(seen.update, delta=delta))
    order, found = read(gradient_map, seen)
    assert found.layers[0].threshold == torch.inf
    assert int((~found.layers[0].seen).sum()) == 8
    filled = fill_unseen(SPEC, order, found)
    assert (filled.inputs - image().flatten()).abs().max() < 1e-3  # by the layers behind
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert "within" not in str(result.stats["stage"])


def test_gradients_of_several_samples_are_refused():
    pixels = torch.rand(2, *SPEC.shape, generator=torch.Generator().manual_seed(0))
    gradient_map, seen = pruned(0.5, images=SPEC.normalize(pixels))
    problem = pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)
    weight, bias = (problem.gradient[f"1.{name}"] for name in ("weight", "bias"))
    with pytest.raises(ValueError, match="do not fit one sample's"):
        PrunedLayer.of(weight, bias, weight, bias)
    with pytest.raises(ValueError, match="nothing is kept"):
        PrunedLayer.of(weight, bias, weight, torch.zeros_like(bias))


@pytest.mark.parametrize("mean", [-30.0, -1.0, 0.3, 30.0])
@pytest.mark.parametrize("ends", [(-1.0, 2.0), (0.0, torch.inf), (-torch.inf, 0.5)])
def test_moments_of_a_truncated_normal_law(mean, ends):
    low, high = (torch.tensor([end], dtype=torch.float64) for end in ends)
    centre, one = torch.tensor([mean]).double(), torch.ones(1).double()
    found = [float(each) for each in truncated(centre, one, low, high)]
    law = scipy.stats.truncnorm(ends[0] - mean, ends[1] - mean, loc=mean)
    assert found == pytest.approx([law.mean(), law.var()], rel=1e-3)


def test_a_law_that_is_wide_beside_its_bounds_is_uniform():
    ends = (torch.tensor([-1e-6]).double(), torch.tensor([3e-6]).double())
    mean, variance = truncated(torch.zeros(1).double(), torch.ones(1).double(), *ends)
    assert float(mean) == pytest.approx(1e-6, rel=1e-3)
    assert float(variance) == pytest.approx(16e-12 / 12, rel=1e-3)
