import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.defenses import (
    DPSGD,
    Chain,
    GradientPruning,
    LocalRound,
    MixUp,
    clipped_mean_gradient,
    dp_epsilon,
)
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update


def make(momentum: float = 0.0, num_steps: int = 3) -> tuple[Update, LocalRound]:
    torch.manual_seed(1)
    gradient_map = GradientMap(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    )
    batch = Batch(torch.randn(5, 1, 2, 2, dtype=torch.float64), torch.arange(5) % 3)
    schedule = LocalSchedule(0.5, num_steps, 2, momentum=momentum, weight_decay=0.01)
    params = gradient_map.params
    delta = local_update(gradient_map, params, batch, schedule)
    return Update(delta, {}, schedule, 5), LocalRound(gradient_map, params, {}, batch, batch)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_clipping_and_noise_it_is_local_training(momentum: float) -> None:
    update, local_round = make(momentum)
    released = DPSGD(math.inf, 0.0).on_update(update, Reproducible(torch.Generator()), local_round)
    torch.testing.assert_close(released.delta, update.delta, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("soft", [False, True])
def test_clipped_mean_equals_a_loop_over_samples(soft: bool) -> None:
    _, local_round = make()
    gradient_map, batch = local_round.gradient_map, local_round.private
    if soft:
        batch = Batch(batch.inputs, F.one_hot(batch.targets, 3).double() * 0.7 + 0.1)
    clipped = clipped_mean_gradient(gradient_map, local_round.params, batch, 0.4, chunk_size=2)
    expected = torch.zeros_like(ravel(clipped))
    norms = []
    for i in range(5):
        gradient = ravel(gradient_map(local_round.params, batch[i : i + 1]))
        norms.append(float(gradient.norm()))
        expected += gradient * min(1.0, 0.4 / norms[-1]) / 5
    assert max(norms) > 0.4
    torch.testing.assert_close(ravel(clipped), expected)


def test_noise_has_the_stated_scale() -> None:
    update, local_round = make(num_steps=1)
    schedule = LocalSchedule(0.5, 1, 5)
    update = Update(update.delta, {}, schedule, 5)
    defense, draws = DPSGD(0.4, 2.0), Reproducible(torch.Generator().manual_seed(0))
    mean = DPSGD(0.4, 0.0).on_update(update, draws, local_round)
    draws = torch.stack(
        [
            ravel(defense.on_update(update, draws, local_round).delta) - ravel(mean.delta)
            for _ in range(100)
        ]
    )
    assert float(draws.std()) == pytest.approx(0.5 * 2.0 * 0.4 / 5, rel=0.05)


def test_samples_that_were_not_kept_are_refused() -> None:
    update, local_round = make()
    fewer = replace(local_round, num_examples=9)
    needs_nine = replace(update, schedule=LocalSchedule(0.1, num_steps=2, batch_size=5))
    with pytest.raises(ValueError, match="on its 9 samples, but only the first 5 were kept"):
        DPSGD(delta=None).on_update(needs_nine, Reproducible(torch.Generator()), fewer)


def test_batch_statistics_are_refused() -> None:
    gradient_map = GradientMap(
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3)), batch_norm="batch"
    )
    batch = Batch(torch.randn(5, 1, 2, 2), torch.arange(5) % 3)
    update = Update(gradient_map.params, {}, LocalSchedule(0.1), 5)
    local_round = LocalRound(gradient_map, gradient_map.params, {}, batch, batch)
    with pytest.raises(ValueError, match="gradients of single samples"):
        DPSGD().on_update(update, Reproducible(torch.Generator()), local_round)


def test_epsilon_of_the_gaussian_mechanism() -> None:
    pytest.importorskip("opacus")
    # One release with sensitivity 1 and σ = 2 is (α, α/8)-RDP; the conversion of Balle et al.
    # (2020, theorem 21), minimised over α.
    delta = 1e-5
    alphas = [1 + x / 10 for x in range(1, 1000)]
    expected = min(
        a / 8 + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in alphas
    )
    assert dp_epsilon(2.0, 1.0, 1, delta) == pytest.approx(expected, rel=1e-2)
    assert dp_epsilon(2.0, 1.0, 4, delta) == pytest.approx(dp_epsilon(1.0, 1.0, 1, delta))
    assert dp_epsilon(2.0, 0.1, 4, delta) < dp_epsilon(2.0, 1.0, 4, delta)
    assert dp_epsilon(0.0, 1.0, 1, delta) == math.inf


def test_epsilon_counts_how_often_a_sample_is_touched() -> None:
    pytest.importorskip("opacus")
    schedule = LocalSchedule(0.1, num_steps=4, batch_size=2)
    defense = DPSGD(1.0, 2.0, delta=1e-4)
    # Three batches an epoch: the first samples are touched twice in four steps.
    expected = dp_epsilon(2.0, 1.0, 6, 1e-4)
    assert defense.epsilon(schedule, 5, 3) == pytest.approx(expected)
    # What comes after cannot weaken the guarantee; mixing before it would.
    assert Chain([defense, GradientPruning(0.5)]).epsilon(schedule, 5, 3) == pytest.approx(expected)
    assert Chain([MixUp(2), defense]).epsilon(schedule, 5, 3) is None


def test_without_delta_there_is_no_epsilon_to_account() -> None:
    assert DPSGD(delta=None).epsilon(LocalSchedule(0.1), 1, 1) is None
    assert GradientPruning(0.9).epsilon(LocalSchedule(0.1), 1, 1) is None


def test_a_missing_accountant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ImportError, match=r"flwr-leakage\[opacus\]"):
        DPSGD().epsilon(LocalSchedule(0.1), 1, 1)


@pytest.mark.parametrize(("sample_rate", "delta"), [(0.0, 0.1), (1.5, 0.1), (1.0, 0.0), (1.0, 1.0)])
def test_accounting_out_of_range(sample_rate: float, delta: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        dp_epsilon(1.0, sample_rate, 1, delta)
