import math
from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

import flwr_leakage
from flwr_leakage.attacks import (
    LBFGS,
    Analytic,
    AttackJob,
    ExactBatch,
    FeatureMatching,
    GradientInversion,
    Strongest,
    pose,
)
from flwr_leakage.attacks.exact.chain import Level, trace_chain
from flwr_leakage.attacks.exact.feature_fit import smooth_variation
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.inversion.objectives import total_variation
from flwr_leakage.defenses import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
INFERRED = ThreatModel()


def generator():
    return torch.Generator().manual_seed(0)


def deep_network(activation, batch_norm=False, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 10, 3, padding=1, stride=2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(10))
    layers += [activation(), nn.Conv2d(10, 8, 3, padding=1), activation()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))
    if batch_norm:
        nn.init.uniform_(network[1].running_mean, -0.2, 0.2)
        nn.init.uniform_(network[1].running_var, 0.5, 1.5)
        nn.init.uniform_(network[1].weight, 0.5, 1.5)
    return network


def case(network, images, label=2, **schedule):
    gradient_map = GradientMap(network)
    batch = Batch(images, torch.full((len(images),), label))
    return gradient_map, observe(gradient_map, batch, LocalSchedule(1.0, **schedule))


INVERTIBLE = (nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign)
BENT = (nn.LogSigmoid, nn.Hardsigmoid, nn.Hardtanh)


@pytest.mark.parametrize("activation", (*INVERTIBLE, *BENT))
@pytest.mark.parametrize("batch_norm", [False, True])
def test_feature_matching_is_exact_through_invertible_activations(activation, batch_norm, images):
    gradient_map, observation = case(deep_network(activation, batch_norm), images[:1])
    (result,) = FeatureMatching()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert result.error == ""
    assert result.batch.targets.tolist() == [2]
    torch.testing.assert_close(result.batch.inputs, images[:1], atol=0.02, rtol=0)


def test_gradient_equations_hold_at_the_truth(images):
    gradient_map, observation = case(deep_network(nn.Tanh, batch_norm=True), images[:1])
    problem = pose(gradient_map, SPEC, observation, INFERRED).to(torch.float64)
    first, second, last = trace_chain(problem)
    features = images[:1].double()
    inputs_of = {}
    for link in (first, second):
        inputs_of[link.name] = features
        features = link.activation.function(link.preactivation(features))
    torch.testing.assert_close(
        last.preactivation(features),
        gradient_map.logits(problem.params, images[:1].double(), problem.buffers),
    )
    errors = last.pull_back(problem.gradient[f"{last.name}bias"][None]).reshape(features.shape)
    errors = errors * second.activation.slope(features)
    equations = Whitened.by_svd(*second.equations(errors), 1e-4)
    found = equations.rows @ inputs_of[second.name].reshape(10, 16).T
    torch.testing.assert_close(found, equations.values, atol=1e-3, rtol=0)
    both = torch.cat([equations.rows, equations.null_space().T])
    torch.testing.assert_close(both @ both.T, torch.eye(16, dtype=torch.float64))


def test_models_that_are_no_chain_and_batches_are_refused(images):
    pooled = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )
    gradient_map, observation = case(pooled, images[:1])
    (result,) = FeatureMatching()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert "does not take the outputs" in result.error
    assert "max_pool2d" in result.error
    gradient_map, observation = case(tiny_network(), images[:2], batch_size=2)
    (result,) = FeatureMatching()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert "1 sample" in result.error


def test_analytic_is_exact_through_a_first_linear_layer(images):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))
    gradient_map, observation = case(network, images[:1])
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert result.batch.targets.tolist() == [2]
    torch.testing.assert_close(result.batch.inputs, images[:1], atol=1e-4, rtol=0)
    gradient_map, observation = case(tiny_network(), images[:1])
    (refused,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert "no linear layer with bias takes the network's input" in refused.error
    assert "computed from other parameters" not in refused.error


def test_a_weight_that_is_computed_is_told_of(images):
    normed = nn.utils.parametrizations.weight_norm
    network = nn.Sequential(
        nn.Flatten(), normed(nn.Linear(64, 20)), nn.ReLU(), normed(nn.Linear(20, 4))
    )
    gradient_map, observation = case(network, images[:1])
    for attack in (Analytic(), ExactBatch()):
        (refused,) = attack(AttackJob(gradient_map, SPEC, [observation], INFERRED))
        assert "weights of linear layers are computed from other parameters" in refused.error


class Odd(nn.Module):
    """Normalises and flattens in its own way, and keeps its weights as (inputs, outputs)."""

    def __init__(self, last="product"):
        super().__init__()
        self.c2, self.c1 = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(20))
        self.w2 = nn.Parameter(torch.randn(20, 4) / 4)
        self.w1 = nn.Parameter(torch.randn(64, 20) / 8)
        self.last = last

    def forward(self, x):
        x = (x.permute(0, 2, 3, 1).flip(1).reshape(len(x), -1) - 0.3) / 0.7
        hidden = torch.relu(torch.addmm(self.c1, x, self.w1))
        if self.last == "einsum":
            return torch.einsum("nf,fk->nk", hidden, self.w2) + self.c2
        return (hidden @ self.w2 + self.c2).log_softmax(1)


@pytest.mark.parametrize("last", ["product", "einsum"])
def test_analytic_takes_an_input_in_any_order_and_weights_in_any(images, last):
    torch.manual_seed(1)
    gradient_map, observation = case(Odd(last), images[:1])
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert result.batch.targets.tolist() == [2]
    torch.testing.assert_close(result.batch.inputs, images[:1], atol=1e-4, rtol=0)
    kept = observation.update.delta["w1"].abs()
    threshold = kept.max(1).values.median()  # of every second pixel nothing is kept
    delta = observation.update.delta
    pruned = {**delta, "w1": delta["w1"] * (kept >= threshold)}
    observation = replace(observation, update=replace(observation.update, delta=pruned))
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert "33 of 64 pixels" in result.stats["stage"]
    errors = (result.batch.inputs - images[:1]).abs()
    assert (errors < 1e-4).sum() >= 33
    bound = 0.7 * threshold / delta["c1"].abs().max()
    assert errors.max() < 2 * bound


def test_analytic_takes_what_pruning_left():
    images = SPEC.normalize(torch.linspace(0.1, 0.8, 64).reshape(1, 1, 8, 8))
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))
    gradient_map, observation = case(network, images[:1])
    update = GradientPruning(0.8).on_update(observation.update, Reproducible.from_seed(0))
    observation = replace(observation, update=update)
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    seen = (update.delta["1.weight"] != 0).any(0)
    assert 10 < int(seen.sum()) < 60
    expected = f"{int(seen.sum())} of 64 pixels, the others, with"
    assert str(result.stats["stage"]).startswith(expected)
    found, truth = result.batch.inputs.flatten(), images[0].flatten()
    torch.testing.assert_close(found[seen], truth[seen], atol=1e-4, rtol=0)
    missed = (found - truth)[~seen].square().mean()
    assert missed < truth[~seen].square().mean()


def test_strongest_keeps_the_nearest_gradient_and_survives_misfits(images):
    poor = GradientInversion(optimizer=LBFGS(iterations=1))
    good = GradientInversion(optimizer=LBFGS(iterations=150, tolerance=1e-12))
    gradient_map, observation = case(tiny_network(), images[:1])
    attack = Strongest({"analytic": Analytic(), "good": good, "poor": poor}, tolerance=0.0)
    (result,) = attack(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert result.stats["iterations"] > 1
    assert result.stats["attack"] == "good"
    assert result.objective < 1e-6
    (none,) = Strongest({"analytic": Analytic()})(
        AttackJob(gradient_map, SPEC, [observation], INFERRED)
    )
    assert none.batch is None
    assert math.isnan(none.objective)
    with pytest.raises(ValueError, match="at least one"):
        Strongest({})


def relu_case():
    """A network of ReLUs, a smooth image and its gradient."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 4),
    )
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")
    image = SPEC.normalize((0.5 + 0.3 * torch.sin(3 * rows + 2 * columns))[None, None])
    return image, *case(network, image)


@pytest.mark.parametrize("pruned", [False, True])
def test_feature_matching_says_what_it_could_not_prove(pruned):
    _, gradient_map, observation = relu_case()
    delta = {}
    for name, value in observation.update.delta.items():
        if pruned:
            threshold = value.abs().flatten().median()
            delta[name] = torch.where(value.abs() < threshold, 0.0, value)
        else:
            noise = torch.randn(value.shape, generator=generator())
            delta[name] = value + 1e-3 * value.square().mean().sqrt() * noise
    observation = replace(observation, update=replace(observation.update, delta=delta))
    (result,) = FeatureMatching()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert math.isfinite(result.objective)
    assert result.stats["proven_masks"] < result.stats["masks"]
    assert result.stats["stage"] in ("rough fading", "longer fading")


def test_feature_matching_recovers_a_smooth_image_through_relus():
    image, gradient_map, observation = relu_case()
    (result,) = FeatureMatching()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert result.objective < 1e-3
    error = (SPEC.denormalize(result.batch.inputs) - SPEC.denormalize(image)).square().mean()
    assert error < 1e-4  # 40 dB


def test_feature_matching_walks_through_a_hidden_linear_layer_of_relus():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 40),
        nn.ReLU(),
        nn.Linear(40, 4),
    )
    image = torch.rand(1, 1, 8, 8, generator=generator())
    gradient_map, observation = case(network, SPEC.normalize(image))
    attack = FeatureMatching(proof=2e-7)  # float32 misses by 1e-7 here
    (result,) = attack(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert len(result.stats["ranks"]) == 2
    assert result.stats["positions"][0] == 1
    torch.testing.assert_close(SPEC.denormalize(result.batch.inputs), image, atol=0.02, rtol=0)


def test_smooth_variation_is_total_variation_away_from_its_kink(images):
    torch.testing.assert_close(smooth_variation(images, 1e-9), total_variation(images))
    flat = torch.full_like(images, 0.3)
    assert float(smooth_variation(flat, 0.02)) == pytest.approx(0.04)


def test_outputs_that_are_not_told_have_no_residual(images):
    gradient_map, observation = case(deep_network(nn.ReLU), images[:1])
    problem = pose(gradient_map, SPEC, observation, INFERRED).to(torch.float64)
    first = trace_chain(problem)[0]
    inputs = images[:1].double()
    outputs = torch.relu(first.preactivation(inputs))
    zeros = torch.zeros_like(outputs)
    equations = Whitened.by_svd(*first.equations(torch.ones_like(outputs)), 1e-4)
    exact = Level(first, Known.exactly(outputs), zeros, equations)
    assert float(exact.forward_residual(inputs).abs().max()) < 1e-12
    wrong = outputs.clone()
    wrong[:, 3:] += 0.1
    known = Known.exactly(wrong)
    assert float(Level(first, known, zeros, equations).forward_residual(inputs).abs().max()) > 0
    bounds = torch.full_like(outputs, torch.inf)
    bounds[:, :3] = 0.0
    partly = Level(first, replace(known, bounds=bounds), zeros, equations)
    assert float(partly.forward_residual(inputs).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("proof", -1.0, "proof must be at least 0, got -1.0"),
        ("rounds", 0, "rounds must be at least 1, got 0"),
        ("fit_iterations", 0, "fit_iterations must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        FeatureMatching(**{name: value})


def test_analytic_needs_a_first_layer_that_is_trained(images):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))
    network[1].bias.requires_grad_(False)
    gradient_map, observation = case(network, images[:1])
    problem = pose(gradient_map, SPEC, observation, INFERRED)
    said = "must be trained, got '1.bias' frozen"
    with pytest.raises(ValueError, match=said):
        Analytic().check(problem, generator())
    (result,) = Analytic()(AttackJob(gradient_map, SPEC, [observation], INFERRED))
    assert said in result.error


def dropping(probability=0.5):
    """A network whose client drops units that nobody else knows."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(probability), nn.Linear(20, 4))
    )


def test_one_sample_is_proven_whatever_dropout_did_behind_its_layer():
    network, batch = dropping().train(), Batch(torch.rand(1, 1, 8, 8), torch.tensor([2]))
    batch = Batch(SPEC.normalize(batch.inputs), batch.targets)
    loss = nn.functional.cross_entropy(network(batch.inputs), batch.targets)
    gradient = torch.autograd.grad(loss, list(network.parameters()))
    for preset in ("analytic", "strongest"):
        with pytest.warns(UserWarning, match="[Dd]ropout"):
            result = flwr_leakage.attack(network, gradient, spec=SPEC, preset=preset)
        assert result.stats["verdicts"] == ("proven",)
        torch.testing.assert_close(result.batch.inputs, batch.inputs, atol=1e-4, rtol=1e-4)


def test_nothing_is_proven_by_a_gradient_that_is_no_outer_product_of_an_image():
    network = dropping(0.0)

    def verdicts(images, change=lambda gradient: gradient):
        batch = Batch(SPEC.normalize(images), torch.arange(len(images)))
        loss = nn.functional.cross_entropy(network(batch.inputs), batch.targets)
        gradient = change(torch.autograd.grad(loss, list(network.parameters())))
        found = flwr_leakage.attack(network, gradient, spec=SPEC, preset="analytic")
        return found.stats.get("verdicts")

    one = torch.rand(1, 1, 8, 8, generator=generator())
    assert verdicts(one) == ("proven",)
    assert verdicts(torch.rand(2, 1, 8, 8, generator=generator())) is None

    def noised(gradient):
        return tuple(g + 1e-3 * g.std() * torch.randn(g.shape) for g in gradient)

    def pruned(gradient):
        limits = (g[g != 0].abs().median() for g in gradient)
        return tuple(
            torch.where(g.abs() > t, g, 0.0) for g, t in zip(gradient, limits, strict=True)
        )

    assert verdicts(one, noised) is verdicts(one, pruned) is None
