"""What scores may spend, in which order, and what a sample that was left out is told."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import make_exposure, small_network

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, LocalSchedule, Measurement
from flwr_leakage.scores import GradientNorm, InputGradientNorm, LambdaMax
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.scores.score_round import (
    PATIENCE,
    RANKING_PRICES,
    SETUP_PRICE,
    Account,
    score_round,
)

COUNT = 12
SCORES = {"gradient_norm": GradientNorm(), "lambda_max": LambdaMax()}


def setting(batch_norm=False):
    draw = torch.Generator().manual_seed(1)
    inputs = (
        torch.rand(COUNT, 1, 6, 6, generator=draw)
        * torch.linspace(0.1, 3, COUNT)[:, None, None, None]
    )
    batch = Batch(inputs, torch.arange(COUNT) % 4)
    gradient_map = GradientMap(
        small_network(batch_norm), batch_norm="batch" if batch_norm else "running"
    )
    return gradient_map, make_exposure(gradient_map, batch, LocalSchedule(0.1, 3, 4), 1e-2)


MAP, EXPOSURE = setting()
RANKING = compute_scores([InputGradientNorm()], MAP, EXPOSURE)["InputGradientNorm"].values
ORDER = sorted(range(COUNT), key=lambda i: -RANKING[i])


@dataclass(frozen=True)
class Costly:
    """A score of so many products a sample."""

    products: int

    def __call__(self, client, seed):
        client.meter.spend(self.products * len(client))
        values = tuple(float(index) for index in client.exposure.indices)
        return [Measurement("costly", values, "1", "", (), self.products * len(client))]


def scored(measurements, name):
    (found,) = [m for m in measurements if m.name == name]
    return [i for i, value in enumerate(found.values) if value is not None]


def play(plan, rounds=1, scores=SCORES, account=None, **settings):
    account = account or Account()
    history = []
    for server_round in range(1, rounds + 1):
        found, account = score_round(
            scores, MAP, EXPOSURE, plan, account, server_round=server_round, seed=3,
            **{"train_seconds": 0.0, **settings},
        )  # fmt: skip
        history.append((found, account))
    return history


def test_without_a_limit_everything_is_scored_as_in_one_call():
    ((found, account),) = play(ScorePlan(relative_cost=None))
    plain = compute_scores(SCORES, MAP, EXPOSURE, seed=3)
    assert [m.name for m in found] == ["input_gradient_norm", "gradient_norm", "lambda_max"]
    for name, measured in zip(SCORES, found[1:], strict=True):
        assert measured == plain[name].measurements[0]
    assert account == Account(0.0, account.ranking, account.sample)


def test_the_first_round_scores_the_sample_most_at_risk_in_advance():
    ((found, account),) = play(ScorePlan(product_price=20.0))
    assert scored(found, "lambda_max") == scored(found, "gradient_norm") == ORDER[:1]
    assert scored(found, "input_gradient_norm") == list(range(COUNT))
    note = found[2].notes[ORDER[1]]
    assert (
        note
        == "not scored: the budget of 0 training gradients was spent on 1 samples before this one"
    )
    assert found[2].notes[ORDER[0]] == ""
    ranking = RANKING_PRICES["most_at_risk"] * COUNT
    spent = ranking + 20 * (found[2].products + SETUP_PRICE)
    assert account.balance == pytest.approx(COUNT - spent)


@settings(deadline=None, max_examples=20)
@given(
    relative_cost=st.floats(0.2, 20),
    price=st.floats(0.5, 30),
    products=st.integers(1, 40),
    every=st.integers(1, 3),
)
def test_scores_never_cost_more_than_training_and_the_advance(
    relative_cost, price, products, every
):
    plan = ScorePlan(relative_cost=relative_cost, product_price=price, every=every)
    ranking = RANKING_PRICES["most_at_risk"] * COUNT
    sample = price * (products + SETUP_PRICE)
    spent = 0.0
    for index, (found, _) in enumerate(play(plan, 12, {"costly": Costly(products)})):
        if found and any(m.name == "costly" for m in found):
            spent += ranking + sample * len(scored(found, "costly"))
        earned = relative_cost * COUNT * (index + 1)
        assert spent <= max(earned, earned - COUNT * relative_cost + ranking + sample) + 1e-6
        if earned >= ranking + sample:  # the advance is paid back
            assert spent <= earned + 1e-6


def test_a_round_that_cannot_pay_says_so_and_saves():
    history = play(ScorePlan(product_price=20.0), 3, {"costly": Costly(10)})
    found, account = history[1]
    assert [m.name for m in found] == ["input_gradient_norm"]
    missing = PATIENCE * (account.ranking + account.sample) - account.balance
    start = "not scored: the training of rounds to come must pay"
    assert set(found[0].notes) == {f"{start} {missing:.0f} training gradients first"}
    assert account.balance == history[0][1].balance + COUNT


def test_nothing_is_saved_once_all_are_scored():
    ((found, account),) = play(
        ScorePlan(product_price=1.0), scores={"costly": Costly(1)}, account=Account(1e4, 1.0, 4.0)
    )
    assert scored(found, "costly") == list(range(COUNT))
    assert found[1].values == tuple(map(float, range(COUNT)))
    assert account.balance == 0


def test_groups_are_joined_in_the_samples_order():
    plan = ScorePlan(product_price=1.0)
    ((found, _),) = play(plan, scores={"costly": Costly(10)}, account=Account(150.0, 1.0, 13.0))
    assert sorted(ORDER[: len(scored(found, "costly"))]) == scored(found, "costly")
    assert 1 < len(scored(found, "costly")) < COUNT
    assert all(found[1].values[i] == i for i in scored(found, "costly"))
    assert found[1].products == 10 * len(scored(found, "costly"))


def test_the_least_number_is_scored_in_every_round():
    plan = ScorePlan(relative_cost=0.1, product_price=20.0, min_samples=2)
    for found, _ in play(plan, 3):
        assert scored(found, "lambda_max") == sorted(ORDER[:2])


@pytest.mark.parametrize("which", ["first", "random", "largest_gradient", "most_at_risk"])
def test_most_samples_are_chosen_by_the_plans_order(which):
    plan = ScorePlan(relative_cost=None, max_samples=3, which=which)
    ((found, _),) = play(plan)
    chosen = scored(found, "lambda_max")
    assert len(chosen) == 3
    expected = {"first": [0, 1, 2], "most_at_risk": sorted(ORDER[:3])}
    assert chosen == expected.get(which, chosen)
    left_out = next(i for i in range(COUNT) if i not in chosen)
    assert found[-1].notes[left_out] == "not scored: the plan's max_samples are others"


def test_measured_seconds_are_paid_by_measured_training():
    rich = play(ScorePlan(), train_seconds=1e6)[0]
    assert scored(rich[0], "lambda_max") == list(range(COUNT))
    poor, account = play(ScorePlan(), train_seconds=0.0)[0]
    assert scored(poor, "lambda_max") == ORDER[:1]
    assert account.balance < 0 and account.ranking > 0 and account.sample > 0
    assert "CPU seconds was spent on 1 samples" in poor[2].notes[ORDER[1]]


def test_what_fails_is_told_and_stops_nothing():
    bad = EXPOSURE.defended
    broken = make_exposure(MAP, bad, LocalSchedule(0.1, 3, 4))
    labels = Batch(bad.inputs, torch.full((COUNT,), 9))
    exposure = type(broken)(
        broken.params, broken.buffers, labels, labels, broken.raw, broken.released
    )
    found, _ = score_round(
        SCORES, MAP, exposure, ScorePlan(), Account(), server_round=1, train_seconds=1e6, seed=0
    )
    assert len(found) == 3
    for measured in found:
        assert measured.values == (None,) * COUNT
        assert "targets must lie in 0 … 3, got 9" in measured.notes[0]


def test_batch_statistics_are_computed_once_for_all_groups(monkeypatch):
    gradient_map, exposure = setting(batch_norm=True)
    passes = []
    statistics = GradientMap.statistics
    monkeypatch.setattr(GradientMap, "statistics", lambda *a: passes.append(0) or statistics(*a))
    found, _ = score_round(
        {"costly": GradientNorm()}, gradient_map, exposure, ScorePlan(product_price=1.0),
        Account(40.0, 1.0, 3.0), server_round=1, train_seconds=0.0, seed=0,
    )  # fmt: skip
    assert len(scored(found, "gradient_norm")) > 1
    assert len(passes) == 2  # in float32, and in float64 for the check of second derivatives


def test_settings_out_of_range_are_refused():
    for settings_, word in (
        ({"relative_cost": 0.0}, "relative_cost"),
        ({"product_price": -1.0}, "product_price"),
        ({"min_samples": -1}, "min_samples"),
        ({"which": "last"}, "which must be"),
    ):
        with pytest.raises(ValueError, match=word):
            ScorePlan(**settings_)
