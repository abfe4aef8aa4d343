import pytest

from flwr_leakage.attacks.exact.fading import Fading
from flwr_leakage.attacks.exact.fading_prior import FadingPrior
from flwr_leakage.attacks.exact.fading_stages import Stage


def test_stages_have_their_fadings():
    fading = FadingPrior(last_weight=1e-7, factor=0.5, iterations=90, near=1e-2, enough=1e-4)
    assert fading.of(Stage.ROUGH) == Fading(10.0, 3e-3, 0.3, 0.8, 60)
    assert fading.of(Stage.MIDDLE) == Fading(0.3, 1e-3, 0.3, 0.8, 120)
    assert fading.of(Stage.LONGER).last == pytest.approx(1e-4)
    assert fading.of(Stage.DEEP) == Fading(1e-2, 1e-7, 0.5, 0.8, 90, True, 1e-2)
    assert fading.of(Stage.DEEP_FROM_GREY) == Fading(10.0, 1e-7, 0.5, 1.5, 90, True, 1e-2)
    assert fading.fitted() == Fading(1e-4, 1e-7, 0.5, 0.8, 90, True, 1e-4)
    with pytest.raises(ValueError, match="nothing fades"):
        fading.of(Stage.EXHAUSTED)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rounds", 0, "rounds must be at least 1, got 0"),
        ("last_weight", 0.0, r"last_weight must lie in \(0, 0.0001\), got 0.0"),
        ("factor", 1.0, r"factor must lie in \(0, 1\), got 1.0"),
        ("iterations", 0, "iterations must be at least 1, got 0"),
        ("deep_blur", -1.0, "blur must be at least 0, got -1.0"),
        ("longer", 0.0, r"longer must lie in \(0, 1\], got 0.0"),
        ("near", -1.0, "near must be at least 0, got -1.0"),
    ],
)
def test_options_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        FadingPrior(**{name: value})
