from dataclasses import replace
from functools import partial

import pytest
import torch
from one_sample import SPEC, equations, hidden, images, network, noisy, posed, pruned, refused
from torch import nn

from flwr_leakage.attacks import AttackJob, GaussNewton
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.records import LocalSchedule, ThreatModel


@pytest.mark.parametrize("change", [lambda delta: delta, noisy, pruned])
def test_units_that_are_on_are_known_and_the_truth_meets_the_equations(change):
    batch = images()
    _, _, problem = posed(network(), batch, change)
    model, likelihood = equations(problem)
    truth = batch.inputs.double()
    with torch.no_grad():
        own = model.features(problem.params, truth)
    mask = model.known.mask
    assert bool((own > 0)[mask.on].all())
    assert not bool((own > 0)[mask.off].any())
    assert int((model.known.values > 0).sum()) > 0.5 * int((own > 0).sum())
    at = likelihood.residual(model.gradient(truth, 0.0, precise=True))
    near = likelihood.residual(model.gradient(truth + 0.05, 0.0, precise=True))
    assert likelihood.distance(at) < 2e-4
    assert likelihood.distance(near) > 20 * likelihood.distance(at)


def test_noise_and_thresholds_hide_units_that_are_then_in_doubt():
    batch = images()

    def doubts(change):
        _, _, problem = posed(network(), batch, change)
        model, _ = equations(problem)
        return int(model.known.mask.open.sum()), int((~model.known.told).sum())

    assert doubts(lambda delta: delta) == (0, 0)
    doubtful, bounded = doubts(partial(noisy, share=0.1))
    assert doubtful > 0 == bounded
    doubtful, bounded = doubts(pruned)
    assert doubtful >= bounded > 0


def test_units_in_doubt_are_off_while_the_blur_is_wide_and_the_candidates_own_then():
    batch = images()
    _, _, problem = posed(network(), batch, partial(noisy, share=0.1))
    model, likelihood = equations(problem)
    truth = batch.inputs.double()

    def misfit(model):
        return likelihood.misfit(likelihood.residual(model.gradient(truth, 0.0, precise=True)))

    assert misfit(model) < 1.2
    off = torch.where(model.known.mask.open, 0.0, model.errors)
    assert misfit(replace(model, errors=off)) > 1.2
    wide = model.gradient(truth, 1.0, precise=True)
    torch.testing.assert_close(wide, replace(model, errors=off).gradient(truth, 1.0, True))


@pytest.mark.parametrize("change", [lambda delta: delta, pruned])
def test_images_are_nearer_than_by_the_gradient_alone(change):
    runs = (Annealing(factor=0.4),)
    alone = GaussNewton(runs, products=200)
    told = GaussNewton(runs, products=200, rewriting=OneSample(runs, products=200))

    def errors(attack, equations):
        for seed in range(2):
            batch = images(seed=seed)
            gradient_map, seen, _ = posed(network(), batch, change)
            (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
            assert result.stats["equations"] == equations
            yield float((result.batch.inputs - batch.inputs).norm())

    plain = sum(errors(alone, "the gradient"))
    assert sum(errors(told, "features and error of the one sample")) < 0.75 * plain


def test_no_further_run_where_noise_explains_what_is_left():
    batch = images()
    runs = (Annealing(blur=0.0, factor=0.1),) * 2
    gradient_map, seen, _ = posed(network(), batch, partial(noisy, share=3.0))
    attack = GaussNewton(runs, products=100)
    (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert result.stats["misfit"] < 1.5
    assert result.stats["products"] < 160


def test_what_does_not_apply_is_told_and_the_gradient_is_fitted():
    assert "one sample in one round" in refused(network(), images(2))
    assert "no bias" in refused(network(bias=False), images())

    def scrambled(delta):
        generator = torch.Generator().manual_seed(0)
        weight = delta["5.weight"]
        noise = torch.randn(weight.shape, generator=generator) * weight.abs().mean()
        return {**delta, "5.weight": weight + noise - noise.mean(0)}

    assert "not that of one sample" in refused(network(), images(), change=scrambled)
    dead = network()
    dead[2].bias.data -= 100.0
    assert "stands out" in refused(dead, images())
    smooth = network()
    smooth[3] = nn.Tanh()
    assert "no ReLU" in refused(smooth, images())


@pytest.mark.parametrize(
    ("settings", "word"), [({"annealings": ()}, "annealings"), ({"products": 0}, "products")]
)
def test_settings_out_of_range_are_named(settings, word):
    with pytest.raises(ValueError, match=word):
        OneSample(**settings)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        *((lambda delta: delta, 1), (lambda delta: delta, 3)),
        *((partial(noisy, share=0.1), 1), (pruned, 1)),  # in several steps these are refused
    ],
)
@pytest.mark.parametrize("blur", [0.0, 0.2, 1.0])
def test_a_chain_of_layers_has_the_same_products_as_autograd(change, steps, blur):
    batch = images()
    _, _, problem = posed(network(), batch, change, LocalSchedule(0.3, steps, 1))
    model, _ = equations(problem)
    assert model.passed.chain is not None
    widths = [0.3 * each.abs() + 0.1 for each in model.kinks(batch.inputs)]
    for each in (model, model.blurred_by(widths)):
        expected = Linearization(partial(each.gradient, blur=blur), batch.inputs)
        found = each.linearize(batch.inputs, blur)
        torch.testing.assert_close(found.value, expected.value)
        direction, dual = torch.randn_like(batch.inputs), torch.randn_like(expected.value)
        torch.testing.assert_close(found.push(direction), expected.push(direction))
        torch.testing.assert_close(found.pull(dual), expected.pull(dual))


def test_a_network_that_is_no_chain_has_its_products_by_autograd():
    batch = images()
    layers = [*network()]
    normalised = [*layers[:2], nn.BatchNorm2d(6), *layers[2:]]
    clamped = [nn.Hardtanh(-4 / 3, 2.0), *layers]  # of all images, but not of all candidates
    for model in (normalised, clamped):
        _, _, problem = posed(nn.Sequential(*model).eval(), batch)
        found, _ = equations(problem)
        assert found.passed.chain is None
        assert isinstance(found.linearize(batch.inputs, 0.5), Linearization)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("change", [lambda delta: delta, noisy, pruned])
def test_of_several_linear_layers_the_first_tells_its_features(pooled, change):
    batch = images()
    model = hidden(pooled)
    _, _, problem = posed(model, batch, change)
    equations_, likelihood = equations(problem)
    assert equations_.passed.narrow.weight == f"{4 if pooled else 3}.weight"
    assert equations_.passed.chain is not None
    features = model[: 4 if pooled else 3](batch.inputs).detach().double()
    known = equations_.known
    sure = ~known.mask.open
    assert float((known.values - features)[sure].norm() / features.norm()) < 0.1
    truth = batch.inputs.double()
    at, off = (
        likelihood.distance(likelihood.residual(equations_.gradient(each, 0.0, precise=True)))
        for each in (truth, truth + 0.05)
    )
    assert at < min(2e-4, off / 20)


def test_a_layer_that_tells_no_features_leaves_it_to_the_next():
    _, _, problem = posed(hidden(bias=False), images())
    assert equations(problem)[0].passed.narrow.weight == "6.weight"
