import dataclasses

import pytest
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import AttackJob, BatchImages, GaussNewton, pose
from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.inversion.annealing import Annealing, RunEnd
from flwr_leakage.attacks.inversion.settling import spreads
from flwr_leakage.attacks.whole_batch.known_errors import FeaturePass
from flwr_leakage.attacks.whole_batch.sharp import (
    Edges,
    Sharpening,
    channels,
    edge_energy,
    reweighted,
    variances,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def images(count, seed=0):
    prior = ImagePrior.of(SPEC).single()
    draws = torch.randn(count, *SPEC.shape, generator=torch.Generator().manual_seed(seed))
    return Batch(SPEC.clamp(prior.inputs(draws)), torch.arange(count) % 4)


def network(pool=None, seed=0):
    torch.manual_seed(seed)
    side = 8 if pool is None else 4
    middle = [] if pool is None else [pool(2)]
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()),
        *middle,
        *(nn.Flatten(), nn.Linear(8 * side * side, 40), nn.ReLU(), nn.Linear(40, 4)),
    )


def posed(model, batch, schedule=None):
    gradient_map = GradientMap(model)
    schedule = schedule or LocalSchedule(1.0, batch_size=len(batch))
    seen = observe(gradient_map, batch, schedule)
    return gradient_map, seen, pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)


def attacked(attack, gradient_map, seen):
    (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    return result


@pytest.mark.parametrize("pool", [None, nn.MaxPool2d, nn.AvgPool2d])
def test_equations_hold_at_the_truth_and_nowhere_near(pool):
    batch = images(3)
    _, _, problem = posed(network(pool), batch)
    model, found = BatchImages().equations(problem, torch.Generator().manual_seed(0))
    own = model.features(problem.params, batch.inputs.double())
    order = torch.cdist(model.known.values, own.clamp_min(0)).argmin(1)
    assert found.labels.tolist() == batch.targets[order].tolist()
    truth = batch.inputs[order].double()
    likelihood = model.likelihood(None)

    def distance(inputs):
        return likelihood.distance(likelihood.residual(model.gradient(inputs, 0.0, precise=True)))

    assert distance(truth) < 1e-11
    assert distance(truth + 1e-2 * torch.randn_like(truth)) > 1e-7
    assert distance(truth.flip(0)) > 1e-3


@pytest.mark.parametrize("share", [5e-6, 1e-5])
def test_a_unit_that_is_hardly_on_is_not_taken_for_off(share):
    batch, model = images(2, seed=1), network()
    with torch.no_grad():
        outputs = model[:3](batch.inputs)
        model[2].bias[3] -= outputs[0, 3, 4, 4] - share * outputs[0].max()
        features = model[:4](batch.inputs)[0]
    assert 0 < features[3, 4, 4] < 2e-5 * features.max()
    _, _, problem = posed(model, batch)
    found, _ = BatchImages().equations(problem, torch.Generator().manual_seed(0))
    own = found.features(problem.params, batch.inputs.double())
    truth = batch.inputs[torch.cdist(found.known.values, own.clamp_min(0)).argmin(1)].double()
    likelihood = found.likelihood(None)
    residual = likelihood.residual(found.gradient(truth, 0.0, precise=True))
    assert likelihood.distance(residual) < 1e-11


def test_the_last_relu_stays_behind_averages():
    batch = images(3)
    for pool, left_out in ((None, 1), (nn.MaxPool2d, 1), (nn.AvgPool2d, -1)):
        _, _, problem = posed(network(pool), batch)
        weight = next(name for name, value in problem.params.items() if value.ndim == 2)
        found = FeaturePass.of(problem, weight, batch.inputs.double())
        assert found.left_out == left_out


def test_all_images_are_found_from_the_update_alone():
    batch = images(2, seed=1)
    gradient_map, seen, _ = posed(network(), batch)
    solver = GaussNewton(annealings=(Annealing(factor=0.4),), products=250, iterations=30)
    found = attacked(BatchImages(solver=solver, sharpening=Sharpening(0)), gradient_map, seen)
    assert sorted(found.batch.targets.tolist()) == [0, 1]
    distances = torch.cdist(found.batch.inputs.flatten(1), batch.inputs.flatten(1))
    assert float(distances.amin(0).max()) < 0.2 * float(batch.inputs.flatten(1).norm(dim=1).min())
    many = "1064 equations leave 128 unknowns little room"
    assert found.stats["end"] == f"none, as 128 unknowns, at most 0 are asked for and {many}"


@dataclasses.dataclass(frozen=True)
class Looked(Budget):
    """A budget that is spent at the third look."""

    looks: list = dataclasses.field(default_factory=list)

    @property
    def is_spent(self):
        self.looks.append(1)
        return len(self.looks) >= 3


def narrow(seed):
    """Three convolutions, of which the gradients tell more than the 48 features."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(12, 12, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)),
    )


def near_the_truth(noise, model=None, seed=1):
    """Equations, the truth, and images beside it."""
    batch = images(2, seed)
    _, _, problem = posed(model or network(), batch)
    model, _ = BatchImages().equations(problem, torch.Generator().manual_seed(0))
    own = model.features(problem.params, batch.inputs.double()).clamp_min(0)
    truth = batch.inputs[torch.cdist(model.known.values, own).argmin(1)].double()
    draw = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    return model, truth, truth + noise * draw


def ended(model, inputs):
    """The likelihood of equations, and a run that ended at some images."""
    likelihood = model.likelihood(None)
    run = RunEnd(inputs, *[float("nan")] * 4, steps=0, products=0, stage="")
    return likelihood, run.judged(model, likelihood)


def test_the_end_corrects_masks():
    model, truth, start = near_the_truth(0.02)
    found, told = Sharpening(steps=4)(model, *ended(model, start), 0.0, Budget())
    assert told in {f"sharpened in {steps} steps" for steps in range(1, 5)}
    assert float((found - truth).norm()) < 0.01 * float((start - truth).norm())


def test_the_end_is_exact_where_masks_taken_as_they_are_stand_still():
    # Without a blur of its own for each unit 0.2 of the distance stays after twelve steps.
    model, truth, start = near_the_truth(0.4, narrow(2), seed=2)
    found, _ = Sharpening()(model, *ended(model, start), 0.0, Budget())
    assert float((found - truth).norm()) < 1e-4 * float((start - truth).norm())


def test_a_batch_that_is_too_large_or_told_too_little_is_refused_in_words():
    model, *_ = near_the_truth(0.1)
    assert Sharpening().obstacle(model) == ""
    assert "128 unknowns, at most 127" in Sharpening(unknowns=127).obstacle(model)
    assert "more than 1000 bytes" in Sharpening(max_bytes=1000).obstacle(model)
    nothing = dataclasses.replace(model.passed, names=())
    told = dataclasses.replace(model, passed=nothing, known=Known.nothing(model.known.values))
    assert "0 equations of 128" in Sharpening().obstacle(told)


def test_the_end_stops_within_a_step_where_the_budget_does():
    model, _, start = near_the_truth(0.02)
    budget = Looked()
    found, told = Sharpening(steps=4)(model, *ended(model, start), 0.0, budget)
    assert (len(budget.looks), told) == (3, "sharpened in 0 steps")
    assert torch.allclose(found, start)


def test_weights_follow_each_channel_and_a_small_group_gets_no_more_than_the_surest_tensor():
    model, _, _ = near_the_truth(0.02)
    likelihood = model.likelihood(None)
    groups = channels(model, likelihood)
    # Two weights of 6 and 8 channels, two biases, the features.
    assert groups.bincount().tolist() == [9] * 6 + [6] + [54] * 8 + [8, 2 * 512]
    residual = 1e-2 * likelihood.observed.abs().mean() * torch.ones(len(groups)).double()
    residual[groups == 6] = 0.0  # a bias
    wrong = groups == 9
    residual[wrong] *= 100
    found = variances(likelihood, residual, groups)
    beside = groups == 10
    assert torch.allclose(found[wrong], 1e4 * found[beside][0])
    own = [likelihood.tensors == tensor for tensor in range(5)]
    sizes = [float(likelihood.observed[each].square().mean()) for each in own]
    least = min(float(residual[own[t]].square().mean()) / sizes[t] for t in (2, 4))
    assert float(found[own[1]].max()) == pytest.approx(least * sizes[1])


def test_every_unit_is_blurred_by_its_spread_over_draws():
    model, _, start = near_the_truth(0.02)
    prior = model.prior
    point = prior.coordinates(start.float())
    still = torch.zeros_like(point)
    still[0] = torch.randn(point[0].shape, generator=torch.Generator().manual_seed(2))
    first, *_ = spreads(model, model.prior.inputs(point), [model.prior.inputs(point + still)])
    assert first.shape == (2, 6, 8, 8)
    assert float(first[0].min()) > 0 and not bool(first[1].any())
    twice = spreads(model, model.prior.inputs(point), [model.prior.inputs(point + 2 * still)])[0]
    assert torch.allclose(twice, 2 * first, rtol=1e-3, atol=1e-5)


def sharp_edges(seed):
    """A batch of two images of a bright block each, and a network that pools most of it away."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.full((2, 1, 8, 8), 0.3) + 0.02 * torch.rand(2, 1, 8, 8, generator=generator)
    pixels[0, :, 1:5, 2:6], pixels[1, :, 4:, :4] = 0.8, 0.7
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4)),
    )
    return model, Batch(SPEC.normalize(pixels), torch.arange(2))


def test_edges_are_sharp_where_equations_leave_images_open():
    def off(edges, model, batch):
        gradient_map, seen, _ = posed(model, batch)
        solver = GaussNewton(annealings=(Annealing(factor=0.5),), products=400, iterations=30)
        found = attacked(BatchImages(solver=solver, edges=edges), gradient_map, seen)
        distances = torch.cdist(found.batch.inputs.flatten(1), batch.inputs.flatten(1))
        return float(distances.amin(0).square().sum()), found.stats["end"]

    seeds = range(6)
    without, told = zip(*(off(Edges(0), *sharp_edges(seed)) for seed in seeds), strict=True)
    assert {each.rpartition(" and ")[2] for each in told} == {"no step was asked for"}
    found, told = zip(*(off(Edges(), *sharp_edges(seed)) for seed in seeds), strict=True)
    assert set(told) == {"edges in 14 steps"}
    # By how much, and on which draws, depends on rounding.
    assert sum(found) < 0.97 * sum(without)
    assert sum(after < before for after, before in zip(found, without, strict=True)) >= 3


def test_images_that_meet_their_equations_are_left_alone_by_the_end_with_edges():
    model, batch = sharp_edges(0)
    gradient_map, seen, _ = posed(model, batch)
    solver = GaussNewton(products=20, solved_distance=10.0)
    found = attacked(BatchImages(solver=solver), gradient_map, seen)
    assert found.stats["end"] == "no edges, as the equations were met"


def test_no_such_end_where_equations_are_many_or_the_budget_is_spent():
    model, _, start = near_the_truth(0.02)
    assert Edges().obstacle(model) == "1064 equations leave 128 unknowns little room"
    found, told = Edges()(model, *ended(model, start), 0.0, Budget(0.0))
    assert told == "no edges, as the budget was spent" and torch.equal(found, start)


def test_the_end_with_edges_is_kept_by_its_own_energy_alone():
    class Rising(Edges):
        def energy(self, model, likelihood, point):
            return float((point - start).square().sum())

    model, _, inputs = near_the_truth(0.1)
    start = model.prior.coordinates(inputs.float())
    found, told = Rising(steps=2)(model, *ended(model, inputs), 0.0, Budget())
    assert told == "edges were not kept" and torch.equal(found, inputs)
    found, told = Edges(steps=2)(model, *ended(model, inputs), 0.0, Budget())
    assert told == "edges in 2 steps" and not torch.equal(found, inputs)


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_squares_have_the_slope_of_the_edge_energy(power):
    prior = ImagePrior.of(InputSpec((3, 6, 8), 4, (0.4,) * 3, (0.3,) * 3))
    point = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    point.requires_grad_()
    (slope,) = torch.autograd.grad(edge_energy(prior, point, power), point)
    cost = reweighted(prior, point.detach(), power)
    assert torch.allclose(slope, 2 * cost(point.detach()))
    # At power 2 it is the prior itself, up to how differences see its highest frequencies.
    lowest = torch.zeros(1, 3, 6, 8).double()
    lowest[..., 0, :2] = 1
    if power == 2:
        assert torch.allclose(cost(lowest), lowest, rtol=0.02)


def test_what_does_not_apply_is_refused_in_words():
    batch = images(2)
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4))
    gradient_map, seen, _ = posed(mlp, batch)
    assert "takes the images themselves" in attacked(BatchImages(), gradient_map, seen).error
    steps = LocalSchedule(0.1, 2, len(batch))
    gradient_map, seen, _ = posed(network(), batch, steps)
    assert "one plain step" in attacked(BatchImages(), gradient_map, seen).error
