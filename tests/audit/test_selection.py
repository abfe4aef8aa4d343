"""Whom the server attacks, and when."""

from dataclasses import replace

import pytest
import torch

from flwr_leakage.audit import Selection
from flwr_leakage.records import LocalSchedule, Observation, Update


def _observation(server_round, client_id):
    update = Update({"w": torch.zeros(1)}, {}, LocalSchedule(0.3), 1)
    return Observation(server_round, client_id, {}, {}, update)


def _chosen(selection, rounds=range(1, 9), clients=range(4)):
    return [
        (o.server_round, o.client_id)
        for r in rounds
        for o in selection([_observation(r, c) for c in clients])
    ]


def test_everything_is_attacked_by_default():
    assert _chosen(Selection()) == [(r, c) for r in range(1, 9) for c in range(4)]


def test_rounds_are_taken_from_the_first_in_equal_steps():
    assert {r for r, _ in _chosen(Selection(every=3, first=2))} == {2, 5, 8}


def test_clients_are_taken_by_id():
    assert _chosen(Selection(clients=(1, 3, 17)), rounds=[1]) == [(1, 1), (1, 3)]


def test_the_lowest_ids_are_taken_where_there_are_too_many():
    selection = Selection(max_clients=2, clients=(1, 2, 3))
    assert _chosen(selection, rounds=[1], clients=[3, 0, 2, 1]) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("name", ["every", "first", "max_clients"])
def test_counts_below_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1( or None)?, got 0"):
        Selection(**{name: 0})


def test_clients_that_a_config_lists_are_kept_as_given():
    clients = [1, 3]
    selection = Selection(clients=clients)
    clients.append(2)
    assert selection.clients == (1, 3)


def test_those_that_are_left_out_are_told_why():
    small, large = _observation(1, 0), _observation(1, 1)
    large = replace(large, update=replace(large.update, num_examples=1200))
    selection = Selection(max_examples=8)
    assert selection([small, large]) == [small]
    assert selection.left_out([small, large]) == {
        1: "1,200 samples, more than the 8 that are attacked at most"
    }
    assert Selection(every=2).left_out([_observation(2, 0)]) == {
        0: "attacks run every 2 rounds from round 1 on"
    }
    assert Selection(clients=[0]).left_out([small, large]) == {1: "the client was not selected"}
    assert Selection(max_clients=1).left_out([small, large]) == {
        1: "at most 1 clients are attacked in a round"
    }
