import math
from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

from flwr_leakage.attacks.inversion.annealing import Annealing, RunEnd
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.counts import label_moves
from flwr_leakage.attacks.problem import pose, simulate_gradient
from flwr_leakage.attacks.rounding import FLOAT32_NOISE
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def smooth_image(seed=0, count=1):
    """A draw of the prior, in the pixels' box."""
    generator = torch.Generator().manual_seed(seed)
    prior = ImagePrior.of(SPEC).single()
    return SPEC.clamp(prior.inputs(torch.randn(count, *SPEC.shape, generator=generator)))


def relu_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
    )


def seen_by_server(network, inputs, labels, change=lambda delta: delta, schedule=None):
    gradient_map = GradientMap(network)
    schedule = schedule or LocalSchedule(0.1, batch_size=len(inputs))
    observation = observe(gradient_map, Batch(inputs, labels), schedule)
    update = Update(change(observation.update.delta), {}, schedule, len(inputs))
    params, buffers = observation.params, observation.buffers
    return gradient_map, Observation(1, 0, params, buffers, update)


def solve(attack, gradient_map, observation):
    (result,) = attack(AttackJob(gradient_map, SPEC, [observation], ThreatModel()))
    return result


def error(result, inputs):
    assert result.error == ""
    return float((result.batch.inputs - inputs).square().mean().sqrt())


@pytest.mark.parametrize("steps", [1, 3])
def test_products_are_those_of_the_dense_jacobian(steps):
    gradient_map = GradientMap(tiny_network())
    params = {name: value.double() for name, value in gradient_map.params.items()}
    schedule = LocalSchedule(0.1, steps, 2)
    inputs = smooth_image(count=2).double()

    def function(inputs):
        batch = Batch(inputs, torch.tensor([1, 3]))
        return ravel(simulate_gradient(gradient_map, params, {}, schedule, batch))

    dense = torch.autograd.functional.jacobian(function, inputs).flatten(1)
    here = Linearization(function, inputs)
    torch.testing.assert_close(here.value, function(inputs))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # the graphs serve more than once
        v = torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
        u = torch.randn(len(dense), generator=generator, dtype=torch.float64)
        torch.testing.assert_close(here.push(v), dense @ v.flatten())
        torch.testing.assert_close(here.pull(u).flatten(), dense.T @ u)
    assert here.products == 4


def test_the_first_step_is_that_of_a_dense_solve():
    gradient_map, observation = seen_by_server(tiny_network(), smooth_image(), torch.tensor([2]))
    attack = GaussNewton((Annealing(blur=0.0),), noise_std=0.0, steps=1, tolerance=1e-6)
    found = solve(attack, gradient_map, observation)
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    prior = ImagePrior.of(SPEC)

    def function(coordinates):
        batch = Batch(prior.inputs(coordinates), torch.tensor([2]))
        gradient = simulate_gradient(
            problem.gradient_map, problem.params, {}, problem.schedule, batch
        )
        return ravel(gradient)

    start = torch.zeros(1, *SPEC.shape, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(function, start).flatten(1)
    likelihood = Likelihood.of([problem.gradient], None)
    weights = 1 / likelihood.noise.square()[likelihood.tensors]
    gram = jacobian.T @ (weights[:, None] * jacobian)
    residual = function(start) - likelihood.observed
    weight = 0.1 * float(torch.linalg.eigvalsh(gram)[-1])
    system = gram + weight * torch.eye(len(gram), dtype=torch.float64)
    step = -torch.linalg.solve(system, jacobian.T @ (weights * residual))
    expected = SPEC.clamp(prior.inputs(step.reshape(start.shape))).float()
    grey = prior.grey.float()
    assert float((expected - grey).norm()) > 0.1
    # The largest eigenvalue is estimated by six products.
    difference = float((found.batch.inputs - expected).norm() / (expected - grey).norm())
    assert difference < 0.05


def test_a_small_smooth_network_is_solved_to_rounding():
    inputs = smooth_image()
    gradient_map, observation = seen_by_server(tiny_network(), inputs, torch.tensor([2]))
    attack = GaussNewton((Annealing(blur=0.0, factor=0.1),), iterations=200, tolerance=1e-3)
    result = solve(attack, gradient_map, observation)
    assert error(result, inputs) < 1e-4
    assert result.batch.targets.tolist() == [2]
    assert result.objective < 1e-10
    said = result.stats
    assert said["stage"].startswith("run 1 of 1")
    assert said["products"] > said["iterations"] > 0


@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_and_local_steps_by_the_same_code(steps):
    inputs, labels = smooth_image(count=2), torch.tensor([0, 3])
    schedule = LocalSchedule(0.1, steps, 2)
    gradient_map, observation = seen_by_server(tiny_network(), inputs, labels, schedule=schedule)
    attack = GaussNewton((Annealing(blur=0.0, factor=0.1),), products=400 * steps, tolerance=1e-2)
    result = solve(attack, gradient_map, observation)
    assert error(result, inputs) < 0.02
    grey = ImagePrior.of(SPEC).grey.float()
    assert float((grey - inputs).square().mean().sqrt()) > 0.3


def test_samples_of_one_label_part():
    """From grey itself both would move alike, to their mean."""
    inputs = smooth_image(count=2)
    gradient_map, observation = seen_by_server(tiny_network(), inputs, torch.tensor([2, 2]))
    attack = GaussNewton((Annealing(blur=0.0, factor=0.5, model_error=1.0),), tolerance=1e-2)
    apart = solve(attack, gradient_map, observation)
    alike = solve(replace(attack, spread=0.0), gradient_map, observation)
    found = min(error(apart, inputs), error(apart, inputs.flip(0)))
    assert found < 0.5 * error(alike, inputs)
    one, two = alike.batch.inputs
    torch.testing.assert_close(one, two, atol=1e-3, rtol=0)


def noisy(share):
    def change(delta):
        generator = torch.Generator().manual_seed(1)
        size = share * ravel(delta).square().mean().sqrt()
        return {k: v + size * torch.randn(v.shape, generator=generator) for k, v in delta.items()}

    return change


def pruned(ratio):
    def change(delta):
        update = Update(delta, {}, LocalSchedule(0.1), 1)
        return GradientPruning(ratio).on_update(update, Reproducible.from_seed(0)).delta

    return change


@pytest.mark.parametrize("change", [noisy(1e-2), pruned(0.5), pruned(0.9)])
def test_through_relus_a_defended_update_still_shows_the_image(change):
    inputs = smooth_image()
    gradient_map, observation = seen_by_server(relu_network(), inputs, torch.tensor([2]), change)
    result = solve(GaussNewton((Annealing(factor=0.4),), products=400), gradient_map, observation)
    grey = ImagePrior.of(SPEC).grey.float()
    assert error(result, inputs) < 0.35 * float((grey - inputs).square().mean().sqrt())


def test_noise_is_estimated_from_the_classes_sum():
    inputs, share = smooth_image(), 1e-2
    gradient_map, clean = seen_by_server(relu_network(), inputs, torch.tensor([2]))
    gradient_map, observation = seen_by_server(
        relu_network(), inputs, torch.tensor([2]), noisy(share)
    )
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    sigma = share * float(ravel(clean.update.pseudo_gradient()).square().mean().sqrt())
    assert estimate_noise(problem) == pytest.approx(sigma, rel=0.1)
    quiet = pose(gradient_map, SPEC, clean, ThreatModel()).to(torch.float64)
    assert estimate_noise(quiet) < 1e-4 * sigma


def test_noise_is_not_guessed_where_the_classes_do_not_cancel():
    inputs, labels = smooth_image(), torch.tensor([2])
    gradient_map, observation = seen_by_server(relu_network(), inputs, labels, pruned(0.5))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    assert estimate_noise(problem) is None
    network = relu_network()
    squares = GradientMap(
        network, lambda logits, y: (logits - nn.functional.one_hot(y, 4)).square().sum()
    )
    observation = observe(squares, Batch(inputs, labels), LocalSchedule(0.1))
    problem = pose(squares, SPEC, observation, ThreatModel()).to(torch.float64)
    assert estimate_noise(problem) is None


def test_likelihood_of_noise_and_of_entries_that_may_be_pruned():
    gradient = {
        "a": torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64),
        "b": torch.zeros(2, dtype=torch.float64),
    }
    likelihood = Likelihood.of([gradient], 0.1)
    torch.testing.assert_close(likelihood.bounds, torch.tensor([0, 1, 0, 1, 1]).double())
    candidate = torch.tensor([3.2, 0.9, -1.0, -0.5, 4.0])
    residual = likelihood.residual(candidate)
    excess = likelihood.excess(residual)
    torch.testing.assert_close(excess, torch.tensor([0.2, 0, 0, 0, 3]).double(), atol=1e-6, rtol=0)
    assert likelihood.misfit(residual) == pytest.approx((0.04 + 9) / 0.01 / 5, rel=1e-5)
    plain = likelihood.variances(residual, 0.0)
    torch.testing.assert_close(plain, torch.tensor([0.01, 1 / 3, 0.01, 1 / 3, 1 / 3]).double())
    error = likelihood.variances(residual, 1.0)
    torch.testing.assert_close(error[3:], torch.full((2,), 4.5, dtype=torch.float64))
    assert error[0] == pytest.approx(0.04 / 3, rel=1e-5)
    # Without noise rounding is left.
    quiet = Likelihood.of([gradient], None)
    assert float(quiet.noise[0]) == pytest.approx(FLOAT32_NOISE * math.sqrt(10 / 3), rel=1e-6)
    assert likelihood.energy(0 * residual) < likelihood.energy(residual)


class WrongLabels:
    """A label attack that mistakes one of two."""

    def __call__(self, problem, generator):
        return torch.tensor([1, 3])


def test_a_wrong_label_is_corrected_by_what_it_leaves_of_the_bias():
    inputs, labels = smooth_image(count=2), torch.tensor([0, 3])
    gradient_map, observation = seen_by_server(tiny_network(), inputs, labels)
    annealings = (Annealing(blur=0.0, factor=0.3),)
    attack = GaussNewton(annealings, products=100, labels=WrongLabels())
    result = solve(attack, gradient_map, observation)
    assert result.batch.targets.tolist() == [0, 3]
    assert result.stats["labels_changed"] == 1
    stubborn = GaussNewton(annealings, products=100, labels=WrongLabels(), label_trials=0)
    kept = solve(stubborn, gradient_map, observation)
    assert kept.batch.targets.tolist() == [1, 3]
    assert kept.objective > 10 * result.objective


def test_moves_of_labels_are_ranked_and_leave_absent_classes_alone():
    targets, residual = torch.tensor([0, 0, 2]), torch.tensor([-0.2, 0.3, 0.1])
    moves = [move.tolist() for move in label_moves(targets, residual, 10)]
    assert moves == [[0, 1, 2], [0, 2, 2], [0, 0, 1], [0, 0, 0]]
    assert len(label_moves(targets, residual, 2)) == 2


def test_what_does_not_apply_is_refused_in_words():
    network = nn.Sequential(nn.Conv2d(1, 4, 8, bias=False), nn.Flatten())
    labels = torch.tensor([2, 3])
    gradient_map, observation = seen_by_server(network, smooth_image(count=2), labels)
    result = solve(GaussNewton(), gradient_map, observation)
    assert result.batch is None
    assert "class counts need a bias of the logits" in result.error
    both = GaussNewton(rewriting=OneSample(), both=True)
    gradient_map, observation = seen_by_server(tiny_network(), smooth_image(), labels[:1])
    result = solve(both, gradient_map, observation)
    assert result.batch is None
    assert "the gradient alone to be fitted, as the features at" in result.error


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"annealings": ()}, "annealings"),
        ({"steps": 0}, "steps"),
        ({"noise_std": -1.0}, "noise_std"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"spread": -0.1}, "spread"),
        ({"both": True}, "rewriting"),
    ],
)
def test_settings_out_of_range_are_named(settings, word):
    with pytest.raises(ValueError, match=word):
        GaussNewton(**settings)


@pytest.mark.parametrize(
    "settings", [{"blur": -1.0}, {"exponent": 0.0}, {"factor": 1.0}, {"model_error": 2.0}]
)
def test_annealings_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Annealing(**settings)


@pytest.mark.parametrize(
    ("features", "gradient", "both", "steps", "fits"),
    [
        *((0.9, 0.5, True, 1, 2), (0.5, 0.9, True, 1, 2)),
        *((0.9, 0.5, False, 1, 1), (0.5, 0.9, False, 1, 1)),
        *((0.9, 0.5, False, 2, 1), (0.5, 0.9, False, 2, 2), (0.5, 0.4, False, 2, 2)),
    ],
)
def test_of_both_fits_the_likelier_is_answered(features, gradient, both, steps, fits, monkeypatch):
    """The gradient of several steps is fitted where features led nowhere, too."""
    fit_nearly(monkeypatch, features, gradient)
    attack = GaussNewton(rewriting=OneSample(), both=both)
    result = solve(attack, *seen_in_steps(steps))
    is_gradient = fits == 2 and gradient > features
    share = gradient if is_gradient else features
    torch.testing.assert_close(result.batch.inputs, SPEC.clamp(share * smooth_image()))
    assert ("gradient" if is_gradient else "features") in result.stats["equations"]
    assert ("the gradient" in result.stats["equations"]) == is_gradient
    assert ("led nowhere" in result.stats["equations"]) == (share == 0.5 and steps == 2)
    assert result.stats["products"] == fits


def test_a_fit_of_the_gradient_that_was_cut_short_replaces_no_nearer_one(monkeypatch):
    fit_nearly(monkeypatch, 0.5, 0.4)
    monkeypatch.setattr(RunEnd, "grouped_energy", lambda self, *args: self.inputs.norm())
    result = solve(GaussNewton(rewriting=OneSample()), *seen_in_steps(2))
    torch.testing.assert_close(result.batch.inputs, SPEC.clamp(0.5 * smooth_image()))


def fit_nearly(monkeypatch, features, gradient):
    """Let either fit end at a share of the image."""

    def fitted(self, equations, known, model, likelihood, budget, start):
        inputs = (gradient if equations is model else features) * smooth_image().double()
        found = RunEnd(inputs, math.nan, math.nan, math.nan, 0.0, 1, 1, "")
        return found.judged(model, likelihood), 1, 1

    monkeypatch.setattr(GaussNewton, "fit", fitted)


def seen_in_steps(steps):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4))
    )
    schedule = LocalSchedule(0.2, steps, 1)
    return seen_by_server(network, smooth_image(), torch.tensor([2]), schedule=schedule)
