"""What the aggregate of several clients is, and how rounds are joined."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.problem import simulate_gradient
from flwr_leakage.audit import Truth
from flwr_leakage.audit.targets import History, Target, aggregate
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)

SCHEDULE = LocalSchedule(0.3, batch_size=4)


def _observation(server_round=1, client_id=0, delta=None, count=1, schedule=SCHEDULE):
    delta = {"w": torch.zeros(1)} if delta is None else delta
    return Observation(server_round, client_id, {}, {}, Update(delta, {}, schedule, count))


def _network(*norm):
    torch.manual_seed(0)
    return nn.Sequential(
        *norm, nn.Flatten(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)
    ).double()


def _clients(counts, schedule, network, mode="running"):
    gradient_map = GradientMap(network, batch_norm=mode)
    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch(
            torch.randn(n, 1, 2, 3, dtype=torch.float64, generator=generator), torch.arange(n) % 3
        )
        for n in counts
    ]
    observations = [
        _observation(
            2, i + 5, local_update(gradient_map, gradient_map.params, b, schedule), len(b), schedule
        )
        for i, b in enumerate(batches)
    ]
    return gradient_map, batches, observations


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_aggregate_of_one_full_step_is_the_update_of_the_union(weight_decay):
    network = _network()
    schedule = LocalSchedule(0.3, batch_size=4, momentum=0.9, weight_decay=weight_decay)
    gradient_map, batches, observations = _clients([1, 4, 2], schedule, network)
    before = [o.update.delta["1.weight"].clone() for o in observations]
    target = aggregate(observations)
    update = target.observation.update
    union = Batch.concatenate(batches)
    expected = local_update(gradient_map, gradient_map.params, union, update.schedule)
    assert update.schedule.batch_size == update.num_examples == 7
    assert update.schedule.weight_decay == weight_decay
    for name, value in expected.items():
        torch.testing.assert_close(update.delta[name], value, rtol=1e-12, atol=1e-14)
    assert (target.observation.server_round, target.observation.client_id) == (2, -1)
    assert target.members == ((5, 1), (6, 4), (7, 2))
    after = [o.update.delta["1.weight"] for o in observations]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("schedule", "counts", "norm"),
    [
        (LocalSchedule(0.3, 3, 2, momentum=0.9, weight_decay=0.1), [1, 5, 2], ()),
        (LocalSchedule(0.3, 1, 4), [1, 5], ()),
        (LocalSchedule(0.3, 1, 4), [2, 4], (nn.BatchNorm2d(1),)),
    ],
)
def test_what_is_no_update_of_the_union_is_explained_by_a_replay_of_every_client(
    schedule, counts, norm
):
    mode = "batch" if norm else "running"
    gradient_map, batches, observations = _clients(counts, schedule, _network(*norm), mode)
    target = aggregate(observations, batch_statistics=bool(norm))
    assert target.observation.members == tuple(counts)
    truth = target.join([Truth(batch, batch) for batch in batches])
    seen = replace(target.observation, params=gradient_map.params, buffers=gradient_map.buffers)
    problem = pose(gradient_map, InputSpec((1, 2, 3), 3), seen, ThreatModel())
    assert len(truth.private) == problem.num_samples
    replayed = simulate_gradient(
        gradient_map, problem.params, {}, problem.schedule, truth.private, problem.members
    )
    for name, value in problem.gradient.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-12, atol=1e-13)


def test_rounds_are_kept_of_each_target_and_joined():
    history = History(rounds=3)
    for server_round in range(1, 6):
        for client in range(2):
            seen = _observation(server_round, client, count=2, schedule=LocalSchedule(0.1, 2, 2))
            fused = history.fuse(Target.of(seen)).observation
            assert fused.server_round == server_round
            expected = range(max(1, server_round - 2), server_round)
            assert [o.server_round for o in fused.earlier] == list(expected)
            assert all(o.client_id == client and not o.earlier for o in fused.earlier)
    assert History().fuse(Target.of(_observation())).observation.earlier == ()


def test_rounds_of_unknown_orders_are_not_joined():
    target = Target.of(_observation(count=5))
    with pytest.raises(ValueError, match="clients of up to 5 samples"):
        History(rounds=2).fuse(target)


def _truth(*targets):
    batch = Batch(torch.zeros(len(targets), 1, 1, 1), torch.tensor(targets))
    return Truth(batch, Batch(batch.inputs + 1, batch.targets))


def test_the_truth_of_a_client_is_what_its_steps_used():
    target = Target.of(_observation(client_id=3, count=5, schedule=LocalSchedule(0.1, 2, 2)))
    assert target.members == ((3, 5),)
    truth = target.join([_truth(0, 1, 2, 3, 4)])
    assert truth.private.targets.tolist() == truth.defended.targets.tolist() == [0, 1, 2, 3]
    assert truth.defended.inputs.sum() == 4


def test_the_truth_of_an_aggregate_is_the_members_in_order():
    target = aggregate([_observation(client_id=c, count=c + 1) for c in (0, 1)])
    assert target.join([_truth(7), _truth(8, 9)]).private.targets.tolist() == [7, 8, 9]
