from dataclasses import replace

import pytest
import torch

from flwr_leakage.attacks import (
    AttackJob,
    DenseGaussNewton,
    FeatureMatching,
    GradientInversion,
    Normal,
)
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.records import ThreatModel


@pytest.fixture
def job(gradient_map, spec, observations):
    return AttackJob(gradient_map, spec, observations, ThreatModel(), seed=3)


def draws(job, index, purpose="start"):
    return torch.rand(4, generator=job.generator(index, purpose)).tolist()


def test_every_target_purpose_restart_and_seed_has_a_stream_of_its_own(job):
    twice = replace(job, observations=[job.observations[0]] * 2, restarts=[0, 1])
    other_round = replace(job.observations[0], server_round=2)
    streams = [
        draws(job, 0),
        draws(job, 1),
        draws(job, 0, "labels"),
        draws(twice, 1),
        draws(replace(job, seed=4), 0),
        draws(replace(job, observations=[other_round]), 0),
    ]
    assert len({tuple(stream) for stream in streams}) == len(streams)
    assert draws(twice, 0) == draws(job, 0)


def test_a_stream_depends_neither_on_the_other_targets_nor_on_their_order(job):
    assert draws(job.take([2, 0]), 0) == draws(job, 2)
    numbered = replace(job, restarts=[5, 6, 7]).take([2])
    assert list(numbered.restarts) == [7]
    assert numbered.seed == 3


def test_wrong_seeds_and_restarts_are_refused(job):
    with pytest.raises(ValueError, match="seed must be ≥ 0, got -1"):
        replace(job, seed=-1)
    with pytest.raises(ValueError, match="one entry for each of 3 observations, got 2"):
        replace(job, restarts=[0, 1])


@pytest.mark.parametrize(
    "attack",
    [
        GradientInversion(
            initialisation=Normal(), optimizer=LBFGS(iterations=4), batching="vmap", dtype="float64"
        ),
        DenseGaussNewton(initialisation=Normal(), steps=2),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_a_result_does_not_depend_on_the_other_targets(attack, job):
    together = attack(job)
    for index in (1, 2):
        (alone,) = attack(job.take([index]))
        torch.testing.assert_close(
            alone.batch.inputs, together[index].batch.inputs, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "attack",
    [
        GradientInversion(optimizer=LBFGS(iterations=3), dtype="float64", batching="loop"),
        FeatureMatching(layer_iterations=20, fit_iterations=5),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_restarts_start_elsewhere_and_the_first_is_that_of_a_job_without_any(attack, job):
    (one,) = attack(job.take([0]))
    three = attack(replace(job, observations=[job.observations[0]] * 3, restarts=[0, 1, 2]))
    assert torch.equal(three[0].batch.inputs, one.batch.inputs)
    assert len({result.objective for result in three}) == 3
