import pytest
import torch
from scipy import stats

from flwr_leakage.defenses import GaussianNoise, LaplacianNoise
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import LocalSchedule, Update

SCHEDULE = LocalSchedule(learning_rate=0.5)
LAWS = {
    GaussianNoise: lambda std: stats.norm(scale=std).cdf,
    LaplacianNoise: lambda std: stats.laplace(scale=std / 2**0.5).cdf,
}


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize(
    ("relative_to", "expected_std"), [("gradient", 0.1), ("update", 0.2), ("norm", 0.2 * 3)]
)
def test_noise_has_the_stated_law(kind, relative_to: str, expected_std: float) -> None:
    delta = {"a": torch.full((100, 100), 3.0), "b": torch.full((10_000,), -3.0)}
    update = Update(delta, {}, SCHEDULE, 1)
    draws = Reproducible(torch.Generator().manual_seed(0))
    released = kind(0.2, relative_to).on_update(update, draws)
    noise = torch.cat([(released.delta[k] - delta[k]).flatten() for k in delta]).double()
    assert stats.kstest(noise.numpy(), LAWS[kind](expected_std)).pvalue > 0.01
    # The law, and not one of another scale: the other law at the same scale fails.
    other = next(law for k, law in LAWS.items() if k is not kind)
    assert stats.kstest(noise.numpy(), other(expected_std)).pvalue < 1e-6
    lagged = torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]
    assert abs(float(lagged)) < 0.03


def test_noise_of_std_01_is_on_the_gradient_scale() -> None:
    update = Update({"w": torch.zeros(10_000)}, {}, LocalSchedule(learning_rate=0.01), 1)
    released = GaussianNoise(0.1).on_update(update, Reproducible(torch.Generator().manual_seed(0)))
    assert float(released.pseudo_gradient()["w"].std()) == pytest.approx(0.1, rel=0.03)
    assert float(released.delta["w"].std()) == pytest.approx(0.001, rel=0.03)
