import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.attacks import Cosine, Euclidean
from flwr_leakage.attacks.inversion.objectives import L1, LayerWeighted, Masked, NoiseAware, Tag


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


OBJECTIVES = [
    L1(),
    Tag(0.3),
    LayerWeighted(Euclidean(), "linear"),
    LayerWeighted(Cosine(), "exponential"),
    LayerWeighted(Tag(), "balanced"),
    Masked(Euclidean()),
    Masked(L1()),
    NoiseAware(0.1),
    NoiseAware(0.1, "laplacian"),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), step=st.floats(0.01, 1))
def test_objectives_are_smallest_at_the_observed_gradient(objective, seed, step):
    observed = gradients(seed)
    direction = gradients(seed + 1)
    moved = {k: v + step * direction[k] for k, v in observed.items()}
    at_truth = float(objective(observed, observed))
    assert at_truth == pytest.approx(0, abs=1e-12)
    assert float(objective(moved, observed)) > at_truth


def test_l1_and_tag_have_their_closed_forms():
    observed = {"w": torch.tensor([3.0, -1.0])}
    candidate = {"w": torch.tensor([2.0, 1.0])}
    assert float(L1()(candidate, observed)) == pytest.approx(3 / 4)
    assert float(Tag(0.2)(candidate, observed)) == pytest.approx(5 / 10 + 0.2 * 3 / 4)


@pytest.mark.parametrize(
    ("scheme", "weights"), [("linear", (1, 1 / 2)), ("exponential", (1, math.exp(-1)))]
)
def test_weights_belong_to_layers_counted_from_the_input(scheme, weights):
    observed, candidate = gradients(0), gradients(1)
    parts = {"a": ("a.weight", "a.bias"), "b": ("b.weight",)}
    above = below = 0.0
    for names, weight in zip(parts.values(), weights, strict=True):
        for name in names:
            above += weight**2 * float((candidate[name] - observed[name]).square().sum())
            below += weight**2 * float(observed[name].square().sum())
    found = LayerWeighted(Euclidean(), scheme)(candidate, observed)
    assert float(found) == pytest.approx(above / below)


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(1e-3, 1e3))
def test_balanced_layers_count_alike_whatever_their_size(factor):
    observed, candidate = gradients(0), gradients(1)
    objective = LayerWeighted(Euclidean(), "balanced")
    before = float(objective(candidate, observed))
    for tensors in (observed, candidate):
        tensors["b.weight"] = factor * tensors["b.weight"]
    assert float(objective(candidate, observed)) == pytest.approx(before)


def test_a_layer_without_gradient_is_harmless():
    observed = gradients(0)
    observed["b.weight"] = torch.zeros(2, 3, dtype=torch.float64)
    value = LayerWeighted(Euclidean(), "balanced")(gradients(1), observed)
    assert bool(torch.isfinite(value))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100), ratio=st.floats(0.1, 0.9))
def test_the_true_gradient_matches_its_pruned_self_only_when_masked(seed, ratio):
    true = gradients(seed)
    entries = torch.cat([v.flatten() for v in true.values()]).abs()
    threshold = entries.quantile(ratio)
    pruned = {k: v * (v.abs() > threshold) for k, v in true.items()}
    for objective in (Euclidean(), Cosine(), L1()):
        assert float(Masked(objective)(true, pruned)) == pytest.approx(0, abs=1e-12)
        assert float(objective(true, pruned)) > 1e-6


@pytest.mark.parametrize(("distribution", "expected"), [("gaussian", 1 / 2), ("laplacian", 1.0)])
def test_noise_of_any_size_costs_the_truth_the_same(distribution, expected):
    generator = torch.Generator().manual_seed(0)
    true = {"w": torch.randn(200_000, generator=generator, dtype=torch.float64)}
    for std in (1e-3, 10.0):
        if distribution == "gaussian":
            noise = std * torch.randn(200_000, generator=generator, dtype=torch.float64)
        else:
            uniform = torch.rand(200_000, generator=generator, dtype=torch.float64) - 0.5
            noise = -std / 2**0.5 * uniform.sign() * (1 - 2 * uniform.abs()).log()
        found = NoiseAware(std, distribution)(true, {"w": true["w"] + noise})
        assert float(found) == pytest.approx(expected, rel=0.02)


def test_the_likelihood_with_a_quadratic_prior_has_its_minimum_at_the_posterior_mean():
    generator = torch.Generator().manual_seed(1)
    jacobian = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    observed = torch.randn(6, generator=generator, dtype=torch.float64)
    std, prior_std = 0.7, 1.3
    normal = jacobian.T @ jacobian / std**2 + torch.eye(3, dtype=torch.float64) / prior_std**2
    posterior_mean = torch.linalg.solve(normal, jacobian.T @ observed / std**2)

    def value(x):
        likelihood = NoiseAware(std)({"w": jacobian @ x}, {"w": observed})
        return likelihood + x.square().sum() / (2 * prior_std**2) / 6

    slope = torch.func.grad(value)(posterior_mean)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-12, rtol=0)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="l1_weight"):
        Tag(-0.1)
    with pytest.raises(ValueError, match="noise_std"):
        NoiseAware(0.0)
