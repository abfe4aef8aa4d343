from dataclasses import replace

import pytest
import torch
from one_sample import SPEC, equations, images, network, noisy, posed, pruned, refused
from torch import nn

from flwr_leakage.attacks import AttackJob, GaussNewton
from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.whole_batch import step_errors
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.attacks.whole_batch.step_errors import separate_steps
from flwr_leakage.records import LocalSchedule, ThreatModel

STEPS = LocalSchedule(0.3, 3, 1)


def walk(problem, batch):
    """Errors and features of every step on a batch."""
    names = list(problem.gradient)[-2:]
    batch = replace(batch, inputs=batch.inputs.double())
    params, errors, features = dict(problem.params), [], []
    for _ in range(problem.schedule.num_steps):
        found = problem.gradient_map(params, batch, problem.buffers)
        weight, error = (found[name].detach() for name in names)
        errors.append(error)
        features.append(weight.T @ error / error.square().sum())
        rate = problem.schedule.learning_rate
        params = {k: v - rate * found[k].detach() if k in found else v for k, v in params.items()}
    return torch.stack(errors), torch.stack(features)


def separated(
    problem, noise=1e-6, steps=None, scramble=False, negated=False, budget=UNLIMITED
):  # fmt: skip
    weight, bias = list(problem.gradient)[-2:]
    observed = torch.cat([problem.gradient[weight], problem.gradient[bias][:, None]], 1)
    if negated:
        observed[:, -1] *= -1
    if scramble:
        observed[1:, :-1] = observed[1:, :-1].roll(1, 0)
    return separate_steps(
        observed,
        problem.params[weight],
        problem.params[bias],
        torch.eye(4, dtype=torch.float64)[0],
        problem.schedule.learning_rate,
        steps or problem.schedule.num_steps,
        noise * float(observed.square().mean().sqrt()),
        budget,
    )


def test_no_further_start_is_tried_once_the_budget_is_spent(monkeypatch):
    tried, attempt = [], step_errors._attempt

    def counted(*args):
        tried.append(1)
        return attempt(*args)

    monkeypatch.setattr(step_errors, "_attempt", counted)
    _, _, problem = posed(network(0), images(seed=0), schedule=LocalSchedule(0.2, 3, 1))
    for budget, tries_again in ((UNLIMITED, True), (Budget.of(0.0), False)):
        tried.clear()
        with pytest.raises(ValueError, match="not that of local steps"):
            separated(problem, scramble=True, budget=budget)
        assert (len(tried) > 1) == tries_again


@pytest.mark.parametrize("steps", [2, 3])
def test_the_last_layers_update_tells_errors_and_features_of_every_step(steps):
    for seed in (0, 1, 3):
        batch = images(seed=seed)
        _, _, problem = posed(network(seed), batch, schedule=LocalSchedule(0.2, steps, 1))
        errors, features = walk(problem, batch)
        assert float((errors[1] - errors[0]).norm()) > 0.03 * float(errors[0].norm())
        found = separated(problem)
        sizes = errors.norm(dim=1, keepdim=True)
        assert float((found.errors - errors).norm()) < 1e-2 * float(errors.norm())
        wrong = sizes * (found.features - features)
        assert float(wrong.norm()) < 1e-2 * float((sizes * features).norm())
        off = (features == 0) & (found.features > 10 * found.deviations)
        assert not bool(off.any())


def told(features, classes=5, rate=0.05, noise=1e-7, seed=0):
    """What steps with given features (T, n) leave of a last layer, and their errors."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, features.shape[1], generator=generator).double() / 50
    bias, target = torch.zeros(classes).double(), torch.eye(classes).double()[0]
    moved, shift, errors = weight, bias, []
    for row in features:
        error = torch.softmax(moved @ row + shift, 0) - target
        moved, shift = moved - rate * torch.outer(error, row), shift - rate * error
        errors.append(error)
    observed = torch.cat([weight - moved, (bias - shift)[:, None]], 1) / rate
    sigma = noise * float(observed.square().mean().sqrt())
    drawn = torch.randn(observed.shape, generator=generator).double()
    observed = observed + sigma * drawn * (observed != 0)
    found = separate_steps(observed, weight, bias, target, rate, len(features), sigma)
    return found, torch.stack(errors)


def sparse(*shape, seed=0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()
    return (drawn - 0.5).clamp_min(0)


@pytest.mark.parametrize("first", [1, 2])
def test_steps_after_the_error_is_gone_are_not_looked_for(first):
    features = sparse(first, 60) * (torch.arange(60) % first == torch.arange(first)[:, None])
    # A step adds about 1/20 of its features' squares to the label's logit.
    features *= 30 / features.norm(dim=1, keepdim=True)
    found, errors = told(torch.cat([features, features[-1:]]))
    assert float(errors[-1].norm()) < 1e-7 < 0.1 < float(errors[:first].norm(dim=1).min())
    assert len(found.errors) == first
    assert float((found.errors - errors[:first]).norm()) < 1e-3 * float(errors.norm())


@pytest.mark.parametrize(
    ("seed", "change", "classes"),
    [(6, 0.1, 5), (7, 0.1, 10), (3, 1.0, 10), (7, 1.0, 5)],
    ids=["exchanged", "exchanged too", "units of their own", "units of their own too"],
)
def test_wrong_minima_are_left(seed, change, classes):
    """The first two are told by an exchange of steps alone, the others by extreme columns."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(n, 120, generator=generator).double() for n in (1, 3))
    features = (common + change * own - 0.5).clamp_min(0)
    found, errors = told(features, classes=classes, seed=seed)
    assert float((found.errors - errors).norm()) < 1e-4 * float(errors.norm())
    torch.testing.assert_close(found.features, features, atol=1e-2, rtol=0)


def test_sums_that_no_steps_explain_are_refused():
    _, _, problem = posed(network(), images(), schedule=STEPS)
    assert separated(problem).misfit < 4
    with pytest.raises(ValueError, match="not that of local steps"):
        separated(problem, scramble=True)
    with pytest.raises(ValueError, match="scale of the features"):
        separated(problem, negated=True)
    with pytest.raises(ValueError, match="noise of 5e-04 hides"):
        separated(problem, noise=1e-3)
    with pytest.raises(ValueError, match="4 steps can not be told apart by 4 classes"):
        separated(problem, steps=4)


def test_the_truth_meets_the_equations_and_the_later_steps_are_needed_for_it():
    batch = images()
    _, _, problem = posed(network(), batch, schedule=STEPS)
    model, likelihood = equations(problem)

    def distance(model, inputs):
        residual = likelihood.residual(model.gradient(inputs.double(), 0.0, precise=True))
        return likelihood.distance(residual)

    at = distance(model, batch.inputs)
    assert at < 1e-6
    assert distance(replace(model, later=model.later[:0], sloped=()), batch.inputs) > 100 * at
    # At θ_0 in the place of θ_t.
    still = replace(model.problem, schedule=LocalSchedule(1e-9, 3, 1))
    assert distance(replace(model, problem=still), batch.inputs) > 100 * at
    assert distance(model, batch.inputs + 0.05) > 100 * at


def test_products_are_those_of_the_first_step():
    batch = images()
    _, _, problem = posed(network(), batch, schedule=STEPS)
    model, _ = equations(problem)
    model = replace(model, sloped=(False, False))
    first = replace(model, later=model.later[:0], sloped=())
    assert model.passes == 1
    direction = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(0))
    all_steps, one = (
        Linearization(lambda x, m=m: m.gradient(x, 0.0), batch.inputs) for m in (model, first)
    )
    torch.testing.assert_close(all_steps.push(direction), one.push(direction))
    assert float((all_steps.value - one.value).norm()) > 1e-2 * float(one.value.norm())


@pytest.mark.parametrize("is_chain", [True, False])
def test_steps_far_from_the_first_have_a_slope(is_chain):
    batch = images()
    _, _, problem = posed(network(), batch, schedule=STEPS)
    model, _ = equations(problem)
    # So slow a client stays at θ_0, and the equations have no other slopes than those told.
    slow = replace(model.problem, schedule=LocalSchedule(1e-9, 3, 1))
    passed = model.passed if is_chain else replace(model.passed, chain=None)
    model = replace(model, problem=slow, passed=passed, sloped=(True, True))
    assert model.passes == 3
    here = model.linearize(batch.inputs, 0.5)
    torch.testing.assert_close(here.value, model.gradient(batch.inputs, 0.5))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(batch.inputs.shape, generator=generator)
    inputs = batch.inputs.double()
    ahead, behind = (
        model.gradient(inputs + step * direction, 0.5, precise=True) for step in (1e-4, -1e-4)
    )
    pushed = here.push(direction)
    torch.testing.assert_close(pushed, ((ahead - behind) / 2e-4).float(), rtol=1e-3, atol=1e-4)
    dual = torch.randn(pushed.shape, generator=generator)
    torch.testing.assert_close(here.pull(dual).flatten() @ direction.flatten(), pushed @ dual)
    shares = [
        replace(model, sloped=sloped).linearize(batch.inputs, 0.5).push(direction)
        for sloped in ((True, False), (False, True), (False, False))
    ]
    torch.testing.assert_close(shares[0] + shares[1] - shares[2], pushed, rtol=1e-3, atol=1e-4)
    assert min(float((share - pushed).norm()) for share in shares) > 1e-2 * float(pushed.norm())


def test_a_step_has_a_slope_where_features_moved_far_and_some_error_is_left():
    for rate, expected in ((0.02, [False, False]), (2.0, [True])):
        _, _, problem = posed(network(), images(), schedule=LocalSchedule(rate, 3, 1))
        model, _ = equations(problem)
        assert model.sloped == expected


def test_images_are_nearer_than_by_the_replay_alone():
    runs = (Annealing(factor=0.4),)
    alone = GaussNewton(runs, products=400)
    told = GaussNewton(runs, products=400, rewriting=OneSample(runs, products=400))

    def errors(attack, equations):
        for seed in range(2):
            batch = images(seed=seed)
            gradient_map, seen, _ = posed(network(), batch, schedule=STEPS)
            (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
            assert result.stats["equations"] == equations
            yield float((result.batch.inputs - batch.inputs).norm())

    plain = sum(errors(alone, "the gradient"))
    assert sum(errors(told, "features and error of the one sample")) < 0.75 * plain


def test_steps_that_can_not_be_told_apart_are_refused_with_the_reason():
    def said(model=None, **settings):
        return refused(model or network(), images(), **{"schedule": STEPS, **settings})

    assert "momentum or weight decay" in said(schedule=LocalSchedule(0.3, 3, 1, momentum=0.5))
    assert "momentum or weight decay" in said(schedule=LocalSchedule(0.3, 2, 1, weight_decay=0.1))
    assert "were pruned" in said(change=pruned)
    assert "noise of" in said(change=noisy)
    smooth = network()
    smooth[3] = nn.Sigmoid()
    assert "no ReLU" in said(smooth)
    dead = network()
    dead[2].bias.data -= 100.0
    assert "did not move" in said(dead)
    _, _, problem = posed(nn.Sequential(nn.BatchNorm2d(1), network()), images(), schedule=STEPS)
    by_batch = problem.gradient_map.with_batch_norm("batch")
    with pytest.raises(ValueError, match="batch's statistics"):
        equations(replace(problem, gradient_map=by_batch))


def test_an_update_whose_bias_did_not_move_is_refused():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target = torch.eye(4, dtype=torch.float64)[0]
    for _ in range(10):
        observed = torch.outer(draw(4), torch.cat([draw(12).clamp_min(0), torch.zeros(1).double()]))
        with pytest.raises(ValueError, match="last"):
            separate_steps(observed, draw(4, 12) / 10, draw(4), target, 0.05, 2, 1e-8)
