import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.defenses import (
    DPSGD,
    QSGD,
    Chain,
    Defense,
    ErrorFeedback,
    GradientPruning,
    RandomSubset,
    SignSGD,
    TruncatedSVD,
    with_error_feedback,
)
from flwr_leakage.params import Params, add, ravel
from flwr_leakage.randomness import Randomness, Reproducible, Secure
from flwr_leakage.records import LocalSchedule, Update


def seeded(seed: int = 0) -> Reproducible:
    return Reproducible(torch.Generator().manual_seed(seed))


def make_delta(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()}


def sent_by(defense: Defense, delta: Params, randomness: Randomness) -> Params:
    return defense.on_update(Update(delta, {}, LocalSchedule(1.0), 1), randomness).delta


def test_a_random_subset_sends_its_share_as_it_is() -> None:
    delta = make_delta(100, 100)
    sent = sent_by(RandomSubset(0.1), delta, seeded())["w"]
    kept = sent != 0
    assert float(kept.double().mean()) == pytest.approx(0.1, abs=0.01)
    assert torch.equal(sent[kept], delta["w"][kept])
    unbiased = sent_by(RandomSubset(0.1, is_unbiased=True), delta, seeded())["w"]
    torch.testing.assert_close(unbiased, 10 * sent)


@given(levels=st.integers(1, 20), bucket=st.integers(1, 60), seed=st.integers(0, 100))
def test_qsgd_takes_a_level_beside_each_entry(levels: int, bucket: int, seed: int) -> None:
    delta = make_delta(7, 9, seed=seed)
    sent = sent_by(QSGD(levels, bucket), delta, seeded(seed))["w"].flatten()
    pieces = zip(sent.split(bucket), delta["w"].flatten().split(bucket), strict=True)
    for found, own in pieces:
        width = own.norm() / levels
        places = found / width
        torch.testing.assert_close(places, places.round())
        assert bool(((found - own).abs() <= width * (1 + 1e-9)).all())
        assert bool((found * own >= 0).all())


def test_qsgd_is_unbiased() -> None:
    delta = make_delta(40)
    draws = [sent_by(QSGD(2, 16), delta, seeded(seed))["w"] for seed in range(4000)]
    mean, spread = torch.stack(draws).mean(0), torch.stack(draws).std(0)
    assert bool(((mean - delta["w"]).abs() <= 5 * spread / 4000**0.5).all())


def test_qsgd_of_zero_is_zero_with_the_operating_systems_draws() -> None:
    sent = sent_by(QSGD(), {"w": torch.zeros(1000)}, Secure())["w"]
    assert torch.equal(sent, torch.zeros(1000))


def test_signs_have_the_mean_size_of_each_tensor_or_the_step() -> None:
    delta = {"w": torch.tensor([3.0, -1.0, 0.0, -4.0]), "b": torch.tensor([-0.5])}
    assert sent_by(SignSGD(), delta, seeded())["w"].tolist() == [2.0, -2.0, 0.0, -2.0]
    assert sent_by(SignSGD(0.25), delta, seeded())["b"].tolist() == [-0.25]


@given(energy=st.floats(0.05, 1.0), seed=st.integers(0, 100))
def test_truncated_svd_has_the_least_rank_with_the_energy(energy: float, seed: int) -> None:
    delta = make_delta(6, 2, 2, 3, seed=seed)
    sent = sent_by(TruncatedSVD(energy), delta, seeded())["w"].flatten(1)
    whole = torch.linalg.svdvals(delta["w"].flatten(1)).square()
    rank = int(torch.linalg.matrix_rank(sent))
    torch.testing.assert_close(sent.square().sum(), whole[:rank].sum())
    assert float(whole[:rank].sum()) >= (energy - 1e-12) * float(whole.sum())
    assert float(whole[: rank - 1].sum()) < energy * float(whole.sum())


def test_error_feedback_sends_everything_in_the_end() -> None:
    defense, carried = GradientPruning(0.9), None
    raw = [make_delta(50, seed=seed) for seed in range(5)]
    sent = {"w": torch.zeros(50).double()}
    for delta in raw:
        update = Update(delta, {}, LocalSchedule(0.1), 1)
        released, carried = with_error_feedback(defense, update, carried, seeded())
        assert int((ravel(released.delta) != 0).sum()) == 5
        sent = add(sent, released.delta)
    assert carried is not None
    total = add(add(raw[0], raw[1]), add(raw[2], add(raw[3], raw[4])))
    torch.testing.assert_close(add(sent, carried), total)
    # A coordinate that is small in every round is sent at last, which pruning alone never does.
    steady = Update({"w": torch.tensor([1.0] + [0.4] * 9)}, {}, LocalSchedule(0.1), 1)
    carried, seen = None, torch.zeros(10)
    for _ in range(30):
        released, carried = with_error_feedback(defense, steady, carried, seeded())
        seen += released.delta["w"]
    assert bool((seen > 0).all())


def test_error_feedback_goes_around_defenses_that_change_the_update() -> None:
    feedback = ErrorFeedback([GradientPruning(0.9)])
    assert feedback.carries
    with pytest.raises(ValueError, match="recomputes it from the data"):
        ErrorFeedback([DPSGD(1.0, 1.0)])
    with pytest.raises(ValueError, match="around a whole chain"):
        Chain([feedback])


def test_error_feedback_refuses_a_residual_of_another_model() -> None:
    update = Update(make_delta(3), {}, LocalSchedule(0.1), 1)
    with pytest.raises(ValueError, match="expected the entries"):
        with_error_feedback(GradientPruning(0.5), update, {"v": torch.ones(3)}, seeded())
