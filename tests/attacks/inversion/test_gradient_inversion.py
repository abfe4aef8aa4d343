import math
from dataclasses import dataclass, replace

import pytest
import torch
from attacked import observe, tiny_network

from flwr_leakage.attacks import (
    LBFGS,
    Adam,
    AttackJob,
    Cosine,
    GradientInversion,
    Normal,
    TotalVariation,
    pose,
)
from flwr_leakage.attacks.budget import UNLIMITED
from flwr_leakage.attacks.problem import simulate_gradient
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel

INFERRED = ThreatModel(labels="inferred")
KNOWN = ThreatModel(labels="known")
SOLVER = GradientInversion(optimizer=LBFGS(iterations=150, tolerance=1e-12))


def largest_error(result, truth):
    return float((result.batch.inputs - truth).abs().max())


def test_one_sample_is_recovered_with_its_label(gradient_map, spec, observations, images):
    results = SOLVER(AttackJob(gradient_map, spec, observations, INFERRED))
    for i, result in enumerate(results):
        assert result.batch.targets.tolist() == [i % 4]
        assert largest_error(result, images[i : i + 1]) < 0.05
        assert result.objective < 1e-6


def test_several_local_steps_are_replayed(gradient_map, spec, images):
    schedule = LocalSchedule(0.1, num_steps=3, batch_size=1, momentum=0.5, weight_decay=1e-3)
    batch = Batch(images[:2], torch.tensor([0, 2]))
    observation = observe(gradient_map, batch, schedule, disclose=True)
    problem = pose(gradient_map, spec, observation, KNOWN)
    replayed = simulate_gradient(gradient_map, problem.params, problem.buffers, schedule, batch)
    for name, value in replayed.items():
        torch.testing.assert_close(value, problem.gradient[name], atol=5e-6, rtol=1e-4)
    solver = replace(SOLVER, optimizer=LBFGS(iterations=400, tolerance=1e-12))
    (result,) = solver(AttackJob(gradient_map, spec, [observation], KNOWN))
    assert largest_error(result, images[:2]) < 0.2


@pytest.mark.parametrize(
    "attack",
    [
        GradientInversion(optimizer=LBFGS(iterations=15), dtype="float64"),
        GradientInversion(
            objective=Cosine(),
            priors={"total_variation": TotalVariation(0.01)},
            initialisation=Normal(),
            optimizer=Adam(iterations=15, sign="none"),
            dtype="float64",
        ),
        GradientInversion(labels="joint", optimizer=LBFGS(iterations=15), dtype="float64"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_batched_equals_one_by_one(attack, count, gradient_map, spec, observations):
    repeated = [seen for seen in observations for _ in range(count)]
    numbers = [*range(count)] * len(observations)
    job = AttackJob(gradient_map, spec, repeated, INFERRED, restarts=numbers)
    for index, result in enumerate(replace(attack, batching="vmap")(job)):
        (alone,) = replace(attack, batching="loop")(job.take([index]))
        torch.testing.assert_close(result.batch.inputs, alone.batch.inputs, atol=1e-4, rtol=0)
        assert result.objective == pytest.approx(alone.objective, rel=1e-4)


def test_same_seed_same_result(gradient_map, spec, observations):
    first, second = (
        SOLVER(AttackJob(gradient_map, spec, observations[:1], INFERRED))[0] for _ in range(2)
    )
    assert torch.equal(first.batch.inputs, second.batch.inputs)


def test_rounds_with_other_parameters_are_solved_together(spec, images, one_step):
    networks = [tiny_network(seed) for seed in range(2)]
    observations = [
        observe(GradientMap(n), Batch(images[i : i + 1], torch.tensor([1])), one_step)
        for i, n in enumerate(networks)
    ]
    attack = replace(SOLVER, batching="vmap")
    results = attack(AttackJob(GradientMap(networks[0]), spec, observations, INFERRED))
    for i, result in enumerate(results):
        assert largest_error(result, images[i : i + 1]) < 0.1


def corrupt(observation, name, value):
    delta = dict(observation.update.delta)
    delta[name] = value
    return replace(observation, update=replace(observation.update, delta=delta))


def test_a_bad_target_is_named_and_the_others_go_on(gradient_map, spec, observations, images):
    good = observations[0]
    zero = {k: torch.zeros_like(v) for k, v in good.update.delta.items()}
    missing = {k: v for k, v in good.update.delta.items() if k != "3.bias"}
    two = replace(good.update.schedule, batch_size=2)
    bad = {
        "NaN": corrupt(good, "3.bias", torch.full((4,), math.nan)),
        "infinite": corrupt(good, "3.bias", torch.full((4,), math.inf)),
        "shape": corrupt(good, "3.bias", torch.ones(5)),
        "zero everywhere": replace(good, update=replace(good.update, delta=zero)),
        "missing or unknown": replace(good, update=replace(good.update, delta=missing)),
        "at least 1 example": replace(good, update=replace(good.update, num_examples=0)),
        "members must sum": replace(good, members=(1, 1)),
        "the same 1 samples": replace(
            good,
            earlier=(replace(good, update=replace(good.update, schedule=two, num_examples=2)),),
        ),
    }
    results = SOLVER(AttackJob(gradient_map, spec, [*bad.values(), good], INFERRED))
    for reason, result in zip(bad, results, strict=False):
        assert result.batch is None
        assert math.isnan(result.objective)
        assert reason in result.error
    assert largest_error(results[-1], images[:1]) < 0.05


def test_more_classes_than_the_head_has_are_named(gradient_map, spec, observations):
    wider = replace(spec, num_classes=7)
    for threat in (INFERRED, KNOWN):
        (result,) = SOLVER(AttackJob(gradient_map, wider, observations[:1], threat))
        assert "one output for each of 7 classes, got 4" in result.error


@dataclass(frozen=True)
class Cramped:
    """An optimizer that runs out of memory with more rows than it takes."""

    most: int
    inner: LBFGS
    error: type[Exception]

    @property
    def iterations(self):
        return self.inner.iterations

    def __call__(self, evaluate, start, project=None, report=None, budget=UNLIMITED):
        if len(start) > self.most:
            raise self.error("not enough memory")
        return self.inner(evaluate, start, project, report, budget)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, torch.OutOfMemoryError])
def test_what_does_not_fit_into_memory_is_solved_in_parts(
    error, gradient_map, spec, observations, images
):
    inner = LBFGS(iterations=5)
    attack = replace(SOLVER, optimizer=inner, dtype="float64", batching="vmap")
    expected = attack(AttackJob(gradient_map, spec, observations, INFERRED))
    cramped = replace(attack, optimizer=Cramped(1, inner, error))
    for result, whole in zip(
        cramped(AttackJob(gradient_map, spec, observations, INFERRED)), expected, strict=True
    ):
        torch.testing.assert_close(result.batch.inputs, whole.batch.inputs, atol=1e-5, rtol=0)
    hopeless = replace(attack, optimizer=Cramped(0, inner, error))
    results = hopeless(AttackJob(gradient_map, spec, observations, INFERRED))
    assert [result.error for result in results] == ["not enough memory"] * 3


def test_labels_are_used_only_where_the_threat_model_grants_them(
    gradient_map, spec, images, one_step
):
    batch = Batch(images[:1], torch.tensor([2]))
    disclosed = observe(gradient_map, batch, one_step, disclose=True)
    lying = replace(disclosed, disclosed=replace(disclosed.disclosed, targets=torch.tensor([1])))
    quick = replace(SOLVER, optimizer=LBFGS(iterations=1))
    (inferred,) = quick(AttackJob(gradient_map, spec, [lying], INFERRED))
    assert inferred.batch.targets.tolist() == [2]
    (known,) = quick(AttackJob(gradient_map, spec, [lying], KNOWN))
    assert known.batch.targets.tolist() == [1]
    (none,) = quick(AttackJob(gradient_map, spec, [observe(gradient_map, batch, one_step)], KNOWN))
    assert "no targets were disclosed" in none.error
    outside = replace(lying, disclosed=replace(lying.disclosed, targets=torch.tensor([4])))
    (wrong,) = quick(AttackJob(gradient_map, spec, [outside], KNOWN))
    assert "[0, 4)" in wrong.error


def test_the_box_is_kept(gradient_map, spec, observations):
    for optimizer in (LBFGS(iterations=5), Adam(iterations=5, learning_rate=3.0)):
        attack = GradientInversion(optimizer=optimizer, initialisation=Normal(5.0))
        (result,) = attack(AttackJob(gradient_map, spec, observations[:1], INFERRED))
        pixels = spec.denormalize(result.batch.inputs)
        assert float(pixels.min()) >= -1e-6
        assert float(pixels.max()) <= 1 + 1e-6


def test_progress_is_told(gradient_map, spec, observations):
    told = []
    SOLVER(AttackJob(gradient_map, spec, observations, INFERRED), told.append)
    assert told
    assert told[0].total == 3
    assert 0 <= told[-1].iteration <= told[-1].iterations


def test_no_observations_no_results(gradient_map, spec):
    assert SOLVER(AttackJob(gradient_map, spec, [], INFERRED)) == []


def test_one_pass_is_for_as_many_rows_as_memory_allows(gradient_map, spec, observations):
    size = sum(value.numel() for value in gradient_map.params.values())
    for entries, way in ((3 * size, "vmap"), (3 * size - 1, "loop")):
        attack = replace(SOLVER, batching="auto", max_entries=entries)
        results = attack(AttackJob(gradient_map, spec, observations, INFERRED))
        assert [result.stats["batching"] for result in results] == [way] * 3
