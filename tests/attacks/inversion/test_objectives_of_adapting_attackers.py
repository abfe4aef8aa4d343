import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.attacks import Cosine, Euclidean
from flwr_leakage.attacks.inversion.objectives import LayerWeighted, Masked, Tag


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


OBJECTIVES = [
    Tag(0.3),
    LayerWeighted(Euclidean(), "linear"),
    LayerWeighted(Cosine(), "exponential"),
    LayerWeighted(Tag(), "balanced"),
    Masked(Euclidean()),
    Masked(Tag()),
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


def test_tag_has_its_closed_form():
    observed = {"w": torch.tensor([3.0, -1.0])}
    candidate = {"w": torch.tensor([2.0, 1.0])}
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
    for objective in (Euclidean(), Cosine(), Tag()):
        assert float(Masked(objective)(true, pruned)) == pytest.approx(0, abs=1e-12)
        assert float(objective(true, pruned)) > 1e-6


def test_settings_are_checked():
    with pytest.raises(ValueError, match="l1_weight"):
        Tag(-0.1)
