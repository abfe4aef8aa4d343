"""Sums of clients, and several rounds of the same samples, through whole attacks."""

from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network

from flwr_leakage.attacks import (
    LBFGS,
    AttackJob,
    DenseGaussNewton,
    GradientInversion,
    Strongest,
)
from flwr_leakage.audit.targets import aggregate
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, Disclosure, LocalSchedule, ThreatModel

KNOWN = ThreatModel(labels="known")
ATTACKS = [
    GradientInversion(optimizer=LBFGS(iterations=200, tolerance=1e-14), dtype="float64"),
    DenseGaussNewton(),
]


def sum_of_two(gradient_map, images, schedule, server_round=1):
    clients = [
        observe(gradient_map, Batch(images[i : i + 1], torch.tensor([i])), schedule)
        for i in range(2)
    ]
    seen = aggregate(clients).observation
    granted = Disclosure(targets=torch.tensor([0, 1]))
    return replace(seen, disclosed=granted, server_round=server_round)


def error(result, images):
    return float((result.batch.inputs - images).square().mean())


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_the_sum_of_clients_that_take_two_steps_is_solved(attack, gradient_map, spec, images):
    seen = sum_of_two(gradient_map, images, LocalSchedule(0.1, num_steps=2))
    assert seen.members == (1, 1)
    (result,) = attack(AttackJob(gradient_map, spec, [seen], KNOWN))
    assert result.objective < 1e-5
    assert error(result, images[:2]) < 0.05
    # The same update, taken for that of one client with both samples, has no such solution.
    mistaken = replace(seen, members=())
    (wrong,) = attack(AttackJob(gradient_map, spec, [mistaken], KNOWN))
    assert wrong.objective > 100 * result.objective


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_two_rounds_tell_more_than_one(attack, spec, images):
    schedule = LocalSchedule(0.1, batch_size=4)
    maps = [GradientMap(tiny_network(seed)) for seed in range(2)]
    batch = Batch(images[:4], torch.tensor([0, 1, 2, 3]))
    first, second = (
        observe(m, batch, schedule, server_round=i, disclose=True) for i, m in enumerate(maps, 1)
    )
    joint = replace(second, earlier=(first,))
    alone, fused = (attack(AttackJob(maps[0], spec, [seen], KNOWN))[0] for seen in (second, joint))
    assert error(fused, batch.inputs) < error(alone, batch.inputs)


def test_attacks_are_compared_over_all_rounds_and_members(gradient_map, spec, images):
    seen = sum_of_two(gradient_map, images, LocalSchedule(0.1, num_steps=2))
    joint = replace(seen, earlier=(seen,))
    strongest = Strongest({"dense_gauss_newton": ATTACKS[1]})
    (result,) = strongest(AttackJob(gradient_map, spec, [joint], KNOWN))
    assert result.objective == pytest.approx(result.stats["own_objective"], abs=1e-9)


def test_statistics_of_one_batch_are_refused_for_a_sum(gradient_map, spec, images):
    seen = sum_of_two(gradient_map, images, LocalSchedule(0.1, num_steps=2))
    for knowledge in ("exact", "derived"):
        threat = ThreatModel(batch_norm=knowledge)
        (result,) = ATTACKS[1](AttackJob(gradient_map, spec, [seen], threat))
        assert "describes one client's batch" in result.error
