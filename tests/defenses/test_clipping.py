import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.defenses import Clipping
from flwr_leakage.defenses.clipping import clip_update
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import LocalSchedule, Update


@given(seed=st.integers(0, 1000), max_norm=st.floats(1e-3, 1e3))
def test_norm_is_bounded_and_direction_kept(seed: int, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = {"w": torch.randn(7, generator=generator).double()}
    clipped = clip_update(delta, max_norm)["w"]
    norm = float(delta["w"].norm())
    assert float(clipped.norm()) == pytest.approx(min(norm, max_norm))
    torch.testing.assert_close(clipped / clipped.norm(), delta["w"] / norm)


def test_zero_update_stays_zero() -> None:
    assert torch.equal(clip_update({"w": torch.zeros(3)}, 1.0)["w"], torch.zeros(3))


def test_gradient_units() -> None:
    update = Update({"w": torch.ones(4)}, {}, LocalSchedule(learning_rate=0.1), 1)
    released = Clipping(3.0, "gradient").on_update(update, Reproducible(torch.Generator()))
    assert float(ravel(released.pseudo_gradient()).norm()) == pytest.approx(3.0)
