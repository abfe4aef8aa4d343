"""The table of ε and its games keep their books right."""

import math

import pytest
import torch

from flwr_leakage.defenses import dp_epsilon
from simulations.benchmarks import epsilon_table
from simulations.benchmarks.epsilon_table import GAMES, Setting, best_threshold, shown_epsilon


def test_a_test_shows_nothing_of_equal_clients_and_much_of_different_ones():
    draws = torch.randn(3, 2000, generator=torch.Generator().manual_seed(100))
    threshold = best_threshold(draws[0], draws[1], 1e-5)
    assert shown_epsilon(draws[0], draws[2], threshold, 1e-5) < 0.3
    # All of 2,000 are named: no more can be shown than that nearly none are wrong.
    assert shown_epsilon(draws[0] + 100, draws[1], 50.0, 1e-5) == pytest.approx(6.3, abs=0.1)
    assert shown_epsilon(draws[0] - 100, draws[1], 50.0, 1e-5) == 0


def test_a_row_is_beside_what_others_compute():
    pytest.importorskip("opacus")
    pytest.importorskip("dp_accounting")
    setting = Setting(100, 20, 1, 2, 1.0, 1e-4)
    poisson, in_order = epsilon_table.accountants([setting])
    assert poisson[:6] == [100, 20, "1 × 2", "1", "0.0001", "poisson"]
    assert float(poisson[6]) == pytest.approx(dp_epsilon(1.0, 0.2, 10, 1e-4), abs=1e-3)
    own = [float(poisson[i]) for i in (6, 8)]
    tight = [float(poisson[i]) for i in (7, 11)]
    assert all(a > b for a, b in zip(own, tight, strict=True))
    assert in_order[6] == in_order[7]
    assert in_order[8:] == ["none", "–", "–", "–"]


def test_games_differ_in_one_record():
    for game in GAMES:
        first, second = game.first, game.second
        if len(first) == len(second):
            assert sum(a != b for a, b in zip(first, second, strict=True)) == 1
        else:
            assert list(first[1:]) == list(second)
    stated = GAMES[0].defense.epsilon(GAMES[0].schedule, 7, 1, "add-or-remove")
    assert stated == math.inf
