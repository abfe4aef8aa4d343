"""The value of a sample does not depend on other scores, their order or other samples."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import make_exposure, small_network

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget
from flwr_leakage.records import Batch, LocalSchedule, Measurement
from flwr_leakage.scores import (
    LAVP,
    Column,
    GradientNorm,
    InfluenceKrylovBound,
    InfluenceLowerBound,
    InversionInfluence,
    JacobianNorm,
    LambdaMax,
    LayerShares,
    Lipschitz,
    NonlinearBound,
    SampleScore,
    SingularInfluence,
)
from flwr_leakage.scores.compute import compute_scores

# In float64, as rounding in single precision depends on the size of a batch.
SCORES = {
    "gradient_norm": GradientNorm(precision="float64"),
    "lambda_max": LambdaMax(precision="float64"),
    "few_steps": LambdaMax(max_steps=4, precision="float64"),
    "rough": LambdaMax(tolerance=0.1, precision="float64"),
    "influence_lower_bound": InfluenceLowerBound(precision="float64"),
    "inversion_influence": InversionInfluence((1e-3,), expected="always", precision="float64"),
    "influence_krylov_bound": InfluenceKrylovBound(precision="float64"),
    "lavp": LAVP(),
    "lavp_by_lanczos": LAVP(("lambda_min", "angular_min"), max_dense_inputs=4),
    "jacobian_norm": JacobianNorm(num_probes=3, precision="float64"),
    "singular_influence": SingularInfluence(),
    "lipschitz": Lipschitz(num_draws=5),
    "nonlinear_bound": NonlinearBound(num_draws=1, precision="float64"),
    "layer_shares": LayerShares(num_probes=3, precision="float64"),
}


def setting(batch_norm=False, noise_std=1e-2):
    model = small_network(batch_norm)
    gradient_map = GradientMap(model, batch_norm="batch" if batch_norm else "running")
    inputs = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    # Samples that differ in how soon they converge, and in their weights.
    batch = Batch(inputs * torch.tensor([1.0, 9.0, 0.1, 3.0])[:, None, None, None], torch.arange(4))
    schedule = LocalSchedule(0.1, 3, 3, momentum=0.5)
    return gradient_map, make_exposure(gradient_map, batch, schedule, noise_std)


CASES = {
    "noise": setting(),
    "undefended": setting(noise_std=0.0),
    "batch statistics": setting(batch_norm=True),
}


@functools.cache
def alone(case):
    """Each score of all samples, computed by itself."""
    return {
        name: {m.name: m.values for m in result}
        for name, score in SCORES.items()
        for result in compute_scores({name: score}, *CASES[case], seed=7).values()
    }


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6, deadline=None)
@given(
    order=st.lists(st.sampled_from(sorted(SCORES)), min_size=1, max_size=4, unique=True),
    samples=st.sets(st.integers(0, 3), min_size=1),
)
def test_a_value_depends_on_its_score_and_its_sample_only(case, order, samples):
    scores = {name: SCORES[name] for name in order}
    found = compute_scores(scores, *CASES[case], seed=7, samples=sorted(samples))
    for name, result in found.items():
        assert not result.error
        for measured in result:
            expected = alone(case)[name][measured.name]
            for index in range(4):
                value = measured.values[index]
                if index not in samples or expected[index] is None:
                    assert value is None, (name, measured.name)
                else:
                    assert value == pytest.approx(expected[index], rel=1e-6), (name, measured.name)


def test_a_score_that_does_not_know_of_selection_scores_the_selected_samples():
    def brightness(client, seed):
        means = client.exposure.private.inputs.flatten(1).mean(1)
        return [Measurement("brightness", tuple(means.tolist()), "pixel", "larger leaks more")]

    gradient_map, exposure = CASES["noise"]
    (found,) = compute_scores([brightness], gradient_map, exposure, samples=[2, 3]).values()
    means = exposure.private.inputs.flatten(1).mean(1).tolist()
    assert found.values == pytest.approx((None, None, means[2], means[3]))


def test_the_influence_does_not_change_with_the_step_limit_of_a_score_before():
    gradient_map, exposure = CASES["noise"]
    score = InversionInfluence((1e-2,), precision="float64")
    short = LambdaMax(max_steps=2, precision="float64")
    (alone,) = compute_scores({"i2f": score}, gradient_map, exposure).values()
    after = compute_scores({"short": short, "i2f": score}, gradient_map, exposure)
    assert after["short"].values == (None,) * 4
    assert after["i2f"].values == alone.values


def test_the_lipschitz_constant_does_not_change_with_the_draws_of_a_score_before():
    gradient_map, exposure = CASES["noise"]
    scores = {"shares": LayerShares(num_probes=2), "lipschitz": Lipschitz(num_draws=3)}
    after = compute_scores(scores, gradient_map, exposure)
    alone = compute_scores({"lipschitz": scores["lipschitz"]}, gradient_map, exposure)
    assert after["lipschitz"] == alone["lipschitz"]
    other = compute_scores({"lipschitz": scores["lipschitz"]}, gradient_map, exposure, seed=1)
    assert other["lipschitz"].values != alone["lipschitz"].values


def test_shared_work_is_paid_for_once_and_a_longer_question_goes_on():
    gradient_map, exposure = CASES["noise"]
    rough = LambdaMax(max_steps=3, precision="float64")
    found = compute_scores({"short": rough, "long": SCORES["lambda_max"]}, gradient_map, exposure)
    alone = compute_scores({"long": SCORES["lambda_max"]}, gradient_map, exposure)
    spent = [result.measurements[0].products for result in found.values()]
    assert sum(spent) == alone["long"].measurements[0].products and min(spent) > 0
    assert found["long"].values == alone["long"].values


def test_a_budget_that_ends_within_a_step_leaves_what_is_shared_as_it_was():
    gradient_map, exposure = CASES["noise"]
    scores = {"a": SCORES["lambda_max"], "b": SCORES["lambda_max"]}
    whole = compute_scores(scores, gradient_map, exposure)["a"]
    products = whole.measurements[0].products
    for limit in range(products - 13, products, 4):
        found = compute_scores(scores, gradient_map, exposure, budget=Budget(products=limit))
        assert "budget" in found["a"].error and "budget" in found["b"].error
        assert sum(m.products for result in found.values() for m in result) <= limit


@dataclass(frozen=True)
class Peak(SampleScore):
    """What a stranger writes."""

    def measure(self, problem, draws):
        peaks = problem.gradients.abs().amax(1)
        return [Column("gradient_peak", peaks, "1", "larger leaks more")]


def test_the_skeleton_does_the_rest_of_a_short_score():
    gradient_map, exposure = CASES["noise"]
    inputs = exposure.private.inputs.clone()
    inputs[1] = torch.nan
    spoiled = replace(exposure, private=Batch(inputs, exposure.private.targets))
    spoiled = replace(spoiled, defended=spoiled.private)
    wide, narrow = Peak(), Peak(memory_bytes=1)
    found = compute_scores({"a": wide, "b": narrow}, gradient_map, spoiled, samples=[0, 1, 3])
    first, second = (found[name].measurements for name in "ab")
    assert replace(first[0], values=second[0].values) == second[0]
    numbers, others = ([v for v in found[name].values if v is not None] for name in "ab")
    assert others == pytest.approx(numbers, rel=1e-6)
    assert [value is None for value in found["a"].values] == [False, True, True, False]
    assert found["a"].notes[1] == "the gradient of this sample is not finite"
    assert found["a"].notes[0] == "" and "not selected" in found["a"].notes[2]


@dataclass(frozen=True)
class Wrong(SampleScore):
    """Values of a wrong number, or infinite ones."""

    infinite: bool = False

    def measure(self, problem, draws):
        values = torch.full((len(problem) + (not self.infinite),), torch.inf)
        return [Column("wrong", values, "1", "larger leaks more")]


def test_values_of_a_wrong_shape_or_not_finite_are_told():
    found = compute_scores([Wrong(), Wrong(infinite=True)], *CASES["noise"])
    assert "one entry for each of 4 samples, got (5,)" in found["Wrong"].error
    assert found["Wrong 2"].values == (None,) * 4
    assert found["Wrong 2"].notes == ("no number: inf",) * 4
