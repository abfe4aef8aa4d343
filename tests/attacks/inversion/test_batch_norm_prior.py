"""What an attacker does with BatchNorm statistics of a client in train mode."""

import copy
from dataclasses import replace

import pytest
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import (
    LBFGS,
    AttackJob,
    Euclidean,
    GradientInversion,
    TotalVariation,
    pose,
)
from flwr_leakage.attacks.inversion.objectives import (
    BatchNormStatistics,
    PriorContext,
    colour_differences,
    statistics_distance,
    total_variation,
)
from flwr_leakage.attacks.problem import simulate_gradient
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet18
from flwr_leakage.records import Batch, Disclosure, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((3, 16, 16), 4, (0.5,) * 3, (0.25,) * 3)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = ResNet18(SPEC.shape, 4, width=2).double().train()
    with torch.no_grad():
        for _ in range(3):  # running statistics that are neither fresh nor those of the batch
            model(torch.randn(8, *SPEC.shape, dtype=torch.float64))
    return model


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(4, *SPEC.shape, generator=generator, dtype=torch.float64)
    return Batch(SPEC.normalize(pixels), torch.tensor([0, 1, 3, 3]))


def observation_of(network, batch, schedule=None):
    """A client in train mode, by torch's own layers, that sends its buffers too."""
    schedule = schedule or LocalSchedule(0.1, batch_size=len(batch))
    gradient_map = GradientMap(network, batch_norm="batch")
    observation = observe(gradient_map, batch, schedule)
    local = copy.deepcopy(network)
    optimizer = torch.optim.SGD(local.parameters(), schedule.learning_rate)
    for window in schedule.slices(len(batch)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(local(batch.inputs[window]), batch.targets[window]).backward()
        optimizer.step()
    buffers = {name: b.detach() for name, b in local.named_buffers()}
    first = batch.inputs[schedule.slices(len(batch))[0]]
    statistics = gradient_map.statistics(gradient_map.params, first, gradient_map.buffers)
    return gradient_map, replace(
        observation,
        update=replace(observation.update, buffers=buffers),
        disclosed=Disclosure(targets=batch.targets, statistics=statistics),
    )


def relative_error(found, expected):
    above = sum((found[k] - expected[k]).square().sum() for k in expected)
    return float((above / sum(v.square().sum() for v in expected.values())).sqrt())


@pytest.mark.parametrize("knowledge", ["exact", "derived", "none"])
def test_the_truth_has_the_observed_gradient_to_rounding(network, batch, knowledge):
    gradient_map, observation = observation_of(network, batch)
    problem = pose(gradient_map, SPEC, observation, ThreatModel("known", knowledge))
    found = simulate_gradient(
        problem.gradient_map, problem.params, problem.buffers, problem.schedule, batch
    )
    assert relative_error(found, problem.gradient) < 1e-12


def test_fixed_statistics_give_another_gradient_even_at_the_truth(network, batch):
    gradient_map, observation = observation_of(network, batch)
    exact = observation.disclosed.statistics
    fixed = gradient_map.with_batch_norm("running")
    found = fixed(observation.params, batch, {**observation.buffers, **exact})
    assert relative_error(found, observation.update.pseudo_gradient()) > 0.1
    problem = pose(gradient_map, SPEC, observation, ThreatModel("known", "running"))
    assert problem.gradient_map.batch_norm == "running"


def penalty(prior, network, batch, observation, knowledge, inputs):
    gradient_map = GradientMap(network, batch_norm="batch")
    problem = pose(gradient_map, SPEC, observation, ThreatModel("known", knowledge))
    context = PriorContext(
        problem.gradient_map, SPEC, problem.params, problem.buffers, problem.statistics
    )
    return float(prior(inputs, context))


@pytest.mark.parametrize("knowledge", ["exact", "derived"])
def test_the_prior_vanishes_at_the_truth_and_only_there(network, batch, knowledge):
    _, observation = observation_of(network, batch)
    prior = BatchNormStatistics(1.0)
    at_truth = penalty(prior, network, batch, observation, knowledge, batch.inputs)
    # one floor of 1e-6 for each of 2 · 20 statistics keeps the root smooth
    assert at_truth == pytest.approx(40e-6, rel=1e-2)
    for other in (0.9 * batch.inputs, batch.inputs + 0.1, batch.inputs.flip(-1)):
        assert penalty(prior, network, batch, observation, knowledge, other) > 1e-3


def test_without_knowledge_there_is_no_penalty_unless_by_the_servers_own(network, batch):
    _, observation = observation_of(network, batch)
    granted, running = BatchNormStatistics(1.0), BatchNormStatistics(1.0, known="running")
    assert penalty(granted, network, batch, observation, "none", batch.inputs) == 0
    by_own = penalty(running, network, batch, observation, "none", batch.inputs)
    statistics = GradientMap(network, batch_norm="batch").statistics(
        observation.params, batch.inputs, observation.buffers
    )
    assert by_own == pytest.approx(float(statistics_distance(statistics, observation.buffers)))


def test_distance_of_statistics_counts_norms():
    left = {"a.running_mean": torch.tensor([3.0, 4.0]), "b.running_var": torch.tensor([1.0])}
    right = {name: torch.zeros_like(value) for name, value in left.items()}
    assert float(statistics_distance(left, right)) == pytest.approx(5 + 1)
    slopes = torch.func.grad(statistics_distance)(left, left)
    assert all(bool(torch.isfinite(slope).all()) for slope in slopes.values())


def test_the_relative_distance_does_not_see_a_layers_scale():
    left = {"a.running_mean": torch.tensor([1.0, 2.0]), "a.running_var": torch.tensor([4.0, 9.0])}
    right = {"a.running_mean": torch.tensor([0.0, 0.0]), "a.running_var": torch.tensor([4.0, 4.0])}
    expected = ((1 / 4 + 4 / 4) / 2) ** 0.5 + (25 / 16 / 2) ** 0.5
    assert float(statistics_distance(left, right, relative=True)) == pytest.approx(expected)
    for statistics in (left, right):
        statistics["a.running_mean"] = 10 * statistics["a.running_mean"]
        statistics["a.running_var"] = 100 * statistics["a.running_var"]
    assert float(statistics_distance(left, right, relative=True)) == pytest.approx(expected)
    root = {name.removeprefix("a."): value for name, value in left.items()}
    assert float(statistics_distance(root, root, relative=True)) == pytest.approx(2e-6)


def test_derived_statistics_are_the_exact_ones_after_one_step(network, batch):
    gradient_map, observation = observation_of(network, batch)
    problem = pose(gradient_map, SPEC, observation, ThreatModel("known", "derived"))
    for name, value in observation.disclosed.statistics.items():
        torch.testing.assert_close(problem.statistics[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("knowledge", ["exact", "running"])
def test_priors_batched_equal_one_by_one(batch, knowledge, steps):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(196, 4)
    ).double()
    schedule = LocalSchedule(0.01, num_steps=steps, batch_size=2)
    pairs = [
        observation_of(network, Batch(batch.inputs[i : i + 2], batch.targets[i : i + 2]), schedule)
        for i in (0, 1)
    ]
    observations = [replace(o, client_id=i) for i, (_, o) in enumerate(pairs)]
    attack = GradientInversion(
        objective=Euclidean(),
        priors={
            "statistics": BatchNormStatistics(1e-3),
            "total_variation": TotalVariation(1e-3, absolute=True, colour=True),
        },
        optimizer=LBFGS(iterations=3),
        dtype="float64",
        batching="vmap",
    )
    threat = ThreatModel("known", knowledge)

    def solve(chosen, batching):
        return replace(attack, batching=batching)(AttackJob(pairs[0][0], SPEC, chosen, threat))

    together = solve(observations, "vmap")
    for observation, result in zip(observations, together, strict=True):
        (alone,) = solve([observation], "loop")
        assert result.error == alone.error == ""
        assert result.objective == pytest.approx(alone.objective, rel=1e-6)
        torch.testing.assert_close(result.batch.inputs, alone.batch.inputs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("knowledge", "found"), [("exact", True), ("running", False)])
def test_over_several_steps_the_prior_is_of_the_first_steps_samples(batch, knowledge, found):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(196, 4)
    ).double()
    schedule = LocalSchedule(0.01, num_steps=2, batch_size=2)
    gradient_map, observation = observation_of(network, batch, schedule)
    attack = GradientInversion(
        priors={"statistics": BatchNormStatistics(1.0)},
        initialisation=lambda *_: batch.inputs,
        optimizer=LBFGS(iterations=1),
        dtype="float64",
    )
    threat = ThreatModel("known", knowledge)
    (result,) = attack(AttackJob(gradient_map, SPEC, [observation], threat))
    assert (result.objective < 1e-5) == found


def test_total_variation_of_sign_flipped_images_is_that_of_the_image():
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 8, 8, generator=generator)
    flipped = image * (torch.rand(image.shape, generator=generator) - 0.5).sign()
    context = PriorContext(GradientMap(nn.Linear(1, 1)), SPEC, {}, {}, {})
    absolute = TotalVariation(2.0, absolute=True)
    assert float(absolute(flipped, context)) == pytest.approx(2 * float(total_variation(image)))
    assert float(TotalVariation(2.0)(flipped, context)) > float(absolute(flipped, context))


def test_colour_differences_are_the_channels_and_their_pairs():
    image = torch.arange(3.0).square().reshape(1, 3, 1, 1).expand(1, 3, 2, 2)
    found = colour_differences(image)
    assert found[0, :, 0, 0].tolist() == [0, 1, 4, -1, -4, -3]
    grey = torch.rand(1, 1, 4, 4).expand(1, 3, 4, 4)
    assert bool((colour_differences(grey)[:, 3:] == 0).all())


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="weight"):
        BatchNormStatistics(-1.0)
