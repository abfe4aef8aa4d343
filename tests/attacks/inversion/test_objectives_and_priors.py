import pytest
import torch
from attacked import tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.attacks import Cosine, Euclidean, TotalVariation
from flwr_leakage.attacks.inversion.objectives import PriorContext, total_variation
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.records import InputSpec


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "b": torch.randn(3, generator=generator, dtype=torch.float64),
    }


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(0.01, 100))
def test_cosine_is_blind_to_scale_and_euclidean_is_not(seed, factor):
    observed = gradients(seed)
    scaled = {k: factor * v for k, v in observed.items()}
    assert float(Cosine()(scaled, observed)) == pytest.approx(0, abs=1e-12)
    assert float(Euclidean()(scaled, observed)) == pytest.approx((factor - 1) ** 2, rel=1e-9)
    opposite = {k: -v for k, v in observed.items()}
    assert float(Cosine()(opposite, observed)) == pytest.approx(2)


def test_cosine_matches_torch():
    left, right = gradients(1), gradients(2)
    expected = 1 - torch.cosine_similarity(ravel(left), ravel(right), dim=0)
    torch.testing.assert_close(Cosine()(left, right), expected)


def test_cosine_of_a_zero_gradient_has_a_finite_derivative():
    zero = {k: torch.zeros_like(v) for k, v in gradients(0).items()}
    derivative = torch.func.grad(lambda g: Cosine()(g, gradients(1)))(zero)
    assert all(bool(torch.isfinite(v).all()) for v in derivative.values())


def test_total_variation_counts_neighbour_differences():
    image = torch.zeros(1, 2, 3, 3)
    image[0, 0, 1, 1] = 1.0
    # four of the 24 neighbour pairs differ by one, half of them vertical
    assert float(total_variation(image)) == pytest.approx(2 / 12 + 2 / 12)
    context = PriorContext(GradientMap(tiny_network()), InputSpec((1, 8, 8), 4), {}, {}, {})
    assert float(TotalVariation(0.5)(image, context)) == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="weight"):
        TotalVariation(-1.0)
