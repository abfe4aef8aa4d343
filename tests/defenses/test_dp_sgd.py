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
    dp_epsilon,
    gaussian_epsilon,
)
from flwr_leakage.defenses.accounting import ADJACENCIES
from flwr_leakage.defenses.dp_sgd import Sampling, clipped_mean_gradient
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update
from simulations.benchmarks.epsilon_table import play, shown_epsilon, signed_records


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


def test_epsilon_counts_how_often_a_sample_is_touched() -> None:
    schedule = LocalSchedule(0.1, num_steps=4, batch_size=2)
    defense = DPSGD(1.0, 2.0, delta=1e-4)
    # Three batches an epoch: the first samples are touched twice in four steps, and another
    # sample in one's place moves the sum of a batch by twice the clip.
    expected = gaussian_epsilon(math.sqrt(6), 1e-4)
    assert defense.epsilon(schedule, 5, 3) == pytest.approx(expected)
    assert defense.epsilon(schedule, 5, 3, "add-or-remove") == math.inf
    # What comes after cannot weaken the guarantee; mixing before it would.
    chain = Chain([defense, GradientPruning(0.5)])
    assert chain.epsilon(schedule, 5, 3) == pytest.approx(expected)
    assert chain.epsilon(schedule, 5, 3, "add-or-remove") == math.inf
    assert Chain([MixUp(2), defense]).epsilon(schedule, 5, 3) is None


def test_epsilon_of_poisson_sampling_counts_every_step() -> None:
    pytest.importorskip("opacus")
    schedule = LocalSchedule(0.1, num_steps=4, batch_size=2)
    defense = DPSGD(1.0, 2.0, 1e-4, "poisson")
    for adjacency in ADJACENCIES:
        expected = dp_epsilon(2.0, 0.4, 12, 1e-4, adjacency)
        assert defense.epsilon(schedule, 5, 3, adjacency) == pytest.approx(expected)
    # A batch that is larger than the client's samples holds all of them.
    whole = LocalSchedule(0.1, num_steps=4, batch_size=9)
    assert defense.epsilon(whole, 5, 1) == pytest.approx(gaussian_epsilon(2.0, 1e-4))


def test_another_adjacency_or_sampling_is_refused(unchecked) -> None:
    with pytest.raises(ValueError, match="adjacency must be one of replace-one, add-or-remove"):
        DPSGD().epsilon(LocalSchedule(0.1), 1, 1, "remove")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling must be one of in_order, poisson, got 'fixed'"):
        DPSGD(sampling="fixed")  # type: ignore[arg-type]


def test_a_removed_record_shifts_all_batches_cut_in_order() -> None:
    """A pair of clients whose updates are 12.9 apart, where ε of one touched batch is 2.

    The records' gradients alternate in sign, so that without the first record every batch holds the
    opposite. Learning rate 1 and weight decay 2 turn the weights' sign in every step,
    w ← −w − g, so that all steps add up in the update.
    """
    steps, delta = 6, 1e-5
    schedule = LocalSchedule(1.0, steps, 1, weight_decay=2.0)
    defense = DPSGD(1e-6, 2.0, delta)
    records = signed_records([1, -1, 1, -1, 1, -1, 1])
    quiet = replace(defense, noise_multiplier=1e-9)
    means = [
        float(play(quiet, schedule, batch, 1, 0)) * 1e-9 / defense.noise_multiplier
        for batch in (records, records[1:])
    ]
    # Every one of the six steps differs by 2C, at noise 2C a step: exactly μ = √6.
    apart = means[0] - means[1]
    assert abs(apart) == pytest.approx(math.sqrt(steps), rel=1e-5)
    true = gaussian_epsilon(abs(apart), delta)
    assert true > 12.6
    # What was stated before counted the one step that holds the record, as though left out.
    assert gaussian_epsilon(1 / 2, delta) < 2.17 < true
    assert defense.epsilon(schedule, 7, 1, "add-or-remove") == math.inf
    # The game, played: the update alone shows more than 2.17.
    first = play(defense, schedule, records, 300, 1)
    second = play(defense, schedule, records[1:], 300, 2)
    sign = math.copysign(1.0, apart)
    shown = shown_epsilon(sign * first, sign * second, sign * means[1] + 2.4, delta)
    assert 2.17 < shown < true


@pytest.mark.parametrize("sampling", ["in_order", "poisson"])
def test_another_record_shows_less_than_the_stated_epsilon(sampling: Sampling) -> None:
    if sampling == "poisson":
        pytest.importorskip("opacus")
    schedule = LocalSchedule(1.0, 2, 2)
    defense = DPSGD(1e-6, 0.7, 1e-5, sampling)
    first = play(defense, schedule, signed_records([1, 1, -1]), 500, 1)
    second = play(defense, schedule, signed_records([-1, 1, -1]), 500, 2)
    sign = float((first - second).mean().sign())
    shown = shown_epsilon(sign * first, sign * second, float((sign * second).mean()) + 1, 1e-5)
    assert 0.5 < shown < defense.epsilon(schedule, 3, 1)


def test_poisson_batches_vary_and_are_divided_by_their_expected_size() -> None:
    # Each record is in a step with the chance 1/4; the mean of the sum over that size is unbiased.
    schedule = LocalSchedule(1.0, 4, 1)
    defense = DPSGD(1e-6, 1e-9, None, "poisson")
    sums = play(defense, schedule, signed_records([1, 1, 1, 1]), 400, 0) * 1e-9 * 2
    counts = sums.abs()
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-4)
    spread = math.sqrt(16 * 0.25 * 0.75)
    assert float(counts.mean()) == pytest.approx(4, abs=4 * spread / 20)
    assert float(counts.std()) == pytest.approx(spread, rel=0.15)


def test_an_empty_poisson_batch_is_noise() -> None:
    class Never(Reproducible):
        def uniform(self, shape):
            return torch.ones(shape)

    update, around = make(num_steps=1)
    update = replace(update, schedule=LocalSchedule(0.5, 5, 1))
    released = [
        DPSGD(1.0, noise, None, "poisson").on_update(
            update, Never(torch.Generator().manual_seed(0)), around
        )
        for noise in (0.0, 1.0)
    ]
    assert not ravel(released[0].delta).any()
    assert float(ravel(released[1].delta).std()) == pytest.approx(0.5 * math.sqrt(5), rel=0.3)


def test_poisson_sampling_needs_all_samples() -> None:
    update, local_round = make()
    fewer = replace(local_round, num_examples=9)
    with pytest.raises(ValueError, match="all 9 samples of the client, and were used and kept"):
        DPSGD(sampling="poisson").on_update(update, Reproducible(torch.Generator()), fewer)
    with pytest.raises(ValueError, match="the local schedule reaches 4"):
        DPSGD(sampling="poisson").epsilon(LocalSchedule(0.1, 2, 2), 5, 1)


def test_a_gradient_that_is_not_finite_is_clipped_as_well() -> None:
    _, local_round = make()
    spoilt = local_round.private.inputs.clone()
    spoilt[0] = math.inf
    batch = Batch(spoilt, local_round.private.targets)
    clipped = clipped_mean_gradient(local_round.gradient_map, local_round.params, batch, 0.4)
    rest = clipped_mean_gradient(local_round.gradient_map, local_round.params, batch[1:], 0.4)
    torch.testing.assert_close(ravel(clipped), ravel(rest) * 4 / 5)


def test_without_delta_there_is_no_epsilon_to_account() -> None:
    assert DPSGD(delta=None).epsilon(LocalSchedule(0.1), 1, 1) is None
    assert GradientPruning(0.9).epsilon(LocalSchedule(0.1), 1, 1) is None


def test_a_missing_accountant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis", None)
    with pytest.raises(ImportError, match=r"flwr-leakage\[opacus\]"):
        DPSGD(sampling="poisson").epsilon(LocalSchedule(0.1, 2), 2, 1)
    assert DPSGD().epsilon(LocalSchedule(0.1, 2), 2, 1) > 0  # in order it takes none
