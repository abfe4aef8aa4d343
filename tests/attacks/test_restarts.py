import math
from dataclasses import dataclass, field

import pytest
import torch

from flwr_leakage.attacks import (
    LBFGS,
    AttackJob,
    FeatureMatching,
    GradientInversion,
    Parallel,
    Restarts,
)
from flwr_leakage.attacks.base import AttackProgress, failure
from flwr_leakage.records import Batch, Reconstruction, ThreatModel


@dataclass
class Scripted:
    """Answers restart r of a target with the r-th of given objectives; ``None`` fails."""

    objectives: tuple
    asked: list = field(default_factory=list)

    def __call__(self, job, progress=None):
        self.asked.append(
            [(o.client_id, r) for o, r in zip(job.observations, job.restarts, strict=True)]
        )
        if progress is not None:
            progress(AttackProgress(3, len(job.observations), 1, 2, 0.5))
        answers = []
        for number in job.restarts:
            objective = self.objectives[number]
            batch = Batch(torch.full((1, 1, 8, 8), float(number)), torch.tensor([0]))
            stats = {"cpu_seconds": 2.0, "gradients": 10, "iterations": number}
            found = Reconstruction(batch, objective or 0.0, stats)
            answers.append(failure(f"no {number}") if objective is None else found)
        return answers


@pytest.fixture
def job(gradient_map, spec, observations):
    return AttackJob(gradient_map, spec, observations, ThreatModel())


def test_the_least_objective_is_kept_and_all_costs_are_summed(job):
    attack = Scripted((0.3, None, 0.1, math.nan))
    told = []
    results = Restarts(attack, 4)(job, told.append)
    assert attack.asked == [[(client, n) for client in range(3) for n in range(4)]]
    for result in results:
        assert result.objective == 0.1
        assert float(result.batch.inputs.mean()) == 2
        assert result.stats == {  # a restart that failed tells no costs
            "cpu_seconds": 6.0, "gradients": 30, "iterations": 2, "restart": 2,
        }  # fmt: skip
    assert (told[0].done, told[0].total) == (0, 3)


def test_where_all_restarts_fail_the_reason_is_the_firsts(job):
    results = Restarts(Scripted((None, None)), 2)(job)
    assert [result.error for result in results] == ["no 0"] * 3
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        Restarts(Scripted(()), 0)


def test_restarts_of_restarts_never_share_a_number(job):
    attack = Scripted((0.5,) * 6)
    Restarts(Restarts(attack, 2), 3)(job.take([1]))
    assert attack.asked == [[(1, n) for n in range(6)]]


@pytest.mark.parametrize(
    "attack",
    [
        GradientInversion(optimizer=LBFGS(iterations=3), dtype="float64", batching="loop"),
        FeatureMatching(layer_iterations=20, fit_iterations=5),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_any_attack_starts_elsewhere_each_time_and_never_gets_worse(attack, job):
    one = attack(job.take([0]))[0]
    several = AttackJob(
        job.gradient_map, job.spec, [job.observations[0]] * 3, job.threat, restarts=[0, 1, 2]
    )
    each = attack(several)
    assert torch.equal(each[0].batch.inputs, one.batch.inputs)
    assert len({result.objective for result in each}) == 3
    (best,) = Restarts(attack, 3)(job.take([0]))
    assert best.objective == min(result.objective for result in each)
    assert each[best.stats["restart"]].objective == best.objective


def test_chunks_of_processes_hold_as_many_restarts_as_targets(job):
    attack = Scripted((0.1, 0.2, 0.3))
    Restarts(Parallel(attack, chunk=2), 3)(job)
    assert [len(asked) for asked in attack.asked] == [2, 2, 2, 2, 1]
