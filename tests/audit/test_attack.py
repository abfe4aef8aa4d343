"""Whatever an attack does, the training goes on."""

import torch
from attacked import observe, tiny_network

from flwr_leakage.attacks import AttackJob
from flwr_leakage.audit.attack import attempt
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel


def job():
    gradient_map = GradientMap(tiny_network())
    batch = Batch(torch.rand(1, 1, 8, 8), torch.tensor([1]))
    seen = observe(gradient_map, batch, LocalSchedule(0.1))
    return AttackJob(gradient_map, InputSpec((1, 8, 8), 4), [seen, seen], ThreatModel())


def test_an_attack_that_raises_is_an_answer_for_every_target():
    def attack(job, progress=None):
        raise ZeroDivisionError("no reason")

    made = attempt(attack, job())
    assert made.error == "ZeroDivisionError: no reason"
    assert [answer.error for answer in made.answers] == [made.error] * 2


def test_an_attack_with_too_few_answers_is_told_and_ends_nothing():
    made = attempt(lambda job, progress=None: [], job())
    assert "each of 2 targets, got 0" in made.error
    assert [answer.batch for answer in made.answers] == [None, None]
