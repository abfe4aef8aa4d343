from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.attacks import LBFGS, AttackJob, Euclidean, GradientInversion, pose
from flwr_leakage.attacks.inversion.evaluation import Candidates, Evaluator
from flwr_leakage.attacks.inversion.order import OrderSearch, local_steps_of
from flwr_leakage.audit.targets import aggregate
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
SEARCH = GradientInversion(
    order=OrderSearch(starts=2, turns=1, iterations=5),
    optimizer=LBFGS(iterations=5),
    dtype="float64",
)


def double_map(seed=0):
    return GradientMap(tiny_network(seed).double())


def draw_batch(count, seed=0):
    stream = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, *SPEC.shape, generator=stream, dtype=torch.float64)
    return Batch(SPEC.normalize(pixels), torch.randint(4, (count,), generator=stream))


def evaluate(problem, samples, order):
    """The attack's objective at given samples, and a function of other orders and targets."""
    evaluator = Evaluator(
        [problem],
        samples.targets[None],
        order[None],
        torch.zeros(1, dtype=torch.int64),
        Candidates(tuple(samples.inputs.shape), SPEC.num_classes, False),
        Euclidean(),
        (),
        "vmap",
    )
    point = samples.inputs.reshape(1, -1)
    value, gradient = evaluator(point, torch.tensor([0]))
    moves = lambda orders, targets: evaluator.moves(point[0], 0, orders, targets)  # noqa: E731
    return float(value), gradient, moves


schedules = st.builds(
    LocalSchedule,
    learning_rate=st.sampled_from([0.01, 0.3]),
    num_steps=st.integers(1, 5),
    batch_size=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=15, deadline=None)
@given(schedule=schedules, counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_at_the_truth_the_objective_is_zero_for_every_schedule_view_and_order(schedule, counts):
    stream = torch.Generator().manual_seed(0)
    seen, batches = [], []
    for rounds, gradient_map in enumerate((double_map(0), double_map(1)), start=1):
        clients = []
        for client, count in enumerate(counts):
            batch = draw_batch(count, seed=client)
            clients.append(observe(gradient_map, batch, schedule, server_round=rounds))
            if rounds == 1:
                batches.append(batch[: schedule.num_samples_used(count)])
        seen.append(aggregate(clients).observation if len(counts) > 1 else clients[0])
    joint = replace(seen[1], earlier=(seen[0],))
    problem = pose(double_map(), SPEC, joint, ThreatModel())
    samples = Batch.concatenate(batches)
    order = torch.randperm(len(samples), generator=stream)
    back = order.argsort()
    shuffled = Batch(samples.inputs[order], samples.targets[order])
    value, gradient, _ = evaluate(problem, shuffled, back)
    assert len(samples) == problem.num_samples
    assert value < 1e-20
    assert float(gradient.abs().max()) < 1e-8


def test_the_order_is_found_where_the_samples_are_right():
    gradient_map, batch = double_map(), draw_batch(6)
    order = torch.tensor([2, 0, 3, 5, 1, 4])
    schedule = LocalSchedule(0.3, num_steps=5, batch_size=2, momentum=0.5)
    seen = observe(gradient_map, batch[order], schedule)
    problem = pose(gradient_map, SPEC, seen, ThreatModel())
    steps = local_steps_of(problem)
    assert steps.tolist() == [3, 3, 4, 4, 2, 2]
    value, _, moves = evaluate(problem, batch, order)
    assert value < 1e-20
    search = OrderSearch(max_moves=10**6)
    found, targets, objective = search.improve(
        torch.arange(6), batch.targets, steps, 4, moves, torch.Generator()
    )
    assert objective < 1e-20
    assert torch.equal(targets, batch.targets)
    for step in range(3):
        pair = slice(2 * step, 2 * step + 2)
        assert sorted(found[pair].tolist()) == sorted(order[pair].tolist())


def test_labels_are_found_where_the_samples_are_right():
    gradient_map, batch = double_map(), draw_batch(3)
    problem = pose(
        gradient_map, SPEC, observe(gradient_map, batch, LocalSchedule(0.3, 3)), ThreatModel()
    )
    _, _, moves = evaluate(problem, batch, torch.arange(3))
    wrong = (batch.targets + torch.tensor([0, 1, 3])) % 4
    steps = local_steps_of(problem)
    search = OrderSearch()
    _, found, _ = search.improve(torch.arange(3), wrong, steps, 4, moves, torch.Generator())
    assert torch.equal(found, batch.targets)
    _, kept, _ = search.improve(torch.arange(3), wrong, steps, None, moves, torch.Generator())
    assert torch.equal(kept, wrong)


def test_steps_of_several_clients_belong_to_steps_of_their_own():
    gradient_map = double_map()
    schedule = LocalSchedule(0.1, num_steps=2, batch_size=2)
    clients = [observe(gradient_map, draw_batch(count), schedule) for count in (1, 3, 5)]
    problem = pose(gradient_map, SPEC, aggregate(clients).observation, ThreatModel())
    assert local_steps_of(problem).tolist() == [1, 2, 2, 3, 4, 4, 5, 5]


def test_together_as_one_by_one():
    gradient_map, schedule = double_map(), LocalSchedule(0.1, num_steps=4, batch_size=1)
    seen = [observe(gradient_map, draw_batch(2, c), schedule, client_id=c) for c in range(2)]

    def run(observations, batching):
        chosen = replace(SEARCH, batching=batching)
        return chosen(AttackJob(gradient_map, SPEC, observations, ThreatModel()))

    for observation, result in zip(seen, run(seen, "vmap"), strict=True):
        (alone,) = run([observation], "loop")
        torch.testing.assert_close(result.batch.inputs, alone.batch.inputs, atol=1e-4, rtol=0)
        assert torch.equal(result.batch.targets, alone.batch.targets)
        assert result.objective == pytest.approx(alone.objective, rel=1e-4)


def test_two_steps_without_labels_are_solved_in_the_clients_order():
    gradient_map = double_map()
    batch = Batch(draw_batch(2).inputs, torch.tensor([3, 1]))
    seen = observe(gradient_map, batch, LocalSchedule(0.3, num_steps=2))
    attack = replace(SEARCH, optimizer=LBFGS(iterations=150, tolerance=1e-14))
    (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert result.batch.targets.tolist() == [3, 1]
    assert float((result.batch.inputs - batch.inputs).square().mean()) < 0.05


def test_granted_labels_are_neither_moved_nor_changed():
    gradient_map = double_map()
    batch = draw_batch(3)
    seen = observe(gradient_map, batch, LocalSchedule(0.3, num_steps=3), disclose=True)
    plain, searching = (
        attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel(labels="known")))[0]
        for attack in (replace(SEARCH, order=None), SEARCH)
    )
    assert torch.equal(searching.batch.targets, batch.targets)
    assert torch.equal(searching.batch.inputs, plain.batch.inputs)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"starts": 0}, "starts must be at least 1"),
        ({"turns": -1}, "turns must be at least 0"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"max_moves": 0}, "max_moves must be at least 1"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        OrderSearch(**setting)
