import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.attacks import Cosine, Euclidean
from flwr_leakage.attacks.inversion.objectives import Masked


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


OBJECTIVES = [Masked(Euclidean()), Masked(Cosine())]


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


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 100), ratio=st.floats(0.1, 0.9))
def test_the_true_gradient_matches_its_pruned_self_only_when_masked(seed, ratio):
    true = gradients(seed)
    entries = torch.cat([v.flatten() for v in true.values()]).abs()
    threshold = entries.quantile(ratio)
    pruned = {k: v * (v.abs() > threshold) for k, v in true.items()}
    for objective in (Euclidean(), Cosine()):
        assert float(Masked(objective)(true, pruned)) == pytest.approx(0, abs=1e-12)
        assert float(objective(true, pruned)) > 1e-6
