"""Whose turn it is where the time is short, and what was said of whom."""

import pytest

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.audit.targets import MAX_HISTORY, History, Target
from flwr_leakage.audit.turns import Once, in_turns
from flwr_leakage.records import LocalSchedule, Observation, Update

pytestmark = pytest.mark.usefixtures("unchecked")  # values of wrong types are meant


class Clock:
    """A budget whose seconds are spent by the one who asks."""

    def __init__(self, left):
        self.left = left

    @property
    def is_spent(self):
        return self.left <= 0

    affordable = Budget.affordable


def test_all_go_at_once_and_in_order_where_there_is_time():
    assert list(in_turns("abc", Clock(180), 60, "s")) == [["a", "b", "c"]]
    assert list(in_turns("abc", Budget(), None, "s")) == [["a", "b", "c"]]
    assert list(in_turns("", Clock(180), 60, "s")) == []


def test_what_ends_early_leaves_time_to_more():
    clock, parts = Clock(100), []
    for part in in_turns(range(10), clock, 50, "s"):
        parts.append(part)
        clock.left -= 10 * len(part)
    assert len(parts[0]) == 2
    assert sorted(number for part in parts for number in part) == list(range(10))
    clock, parts = Clock(100), []
    for part in in_turns(range(10), clock, 50, "s"):
        parts.append(part)
        clock.left -= 50 * len(part)
    assert [len(part) for part in parts] == [2]


def test_each_has_the_same_chance():
    first = [next(in_turns(range(4), Clock(1), 1, f"0-{number}"))[0] for number in range(400)]
    assert all(60 < first.count(client) < 140 for client in range(4))


def test_things_are_said_once_and_not_without_end():
    once = Once(3)
    assert [once.says(1, text) for text in "aab"] == ["a", "", "b"]
    assert once.says(2, "a") == "a"
    assert once.says(1, "c") == "c"
    assert "3 different things were recorded" in once.says(1, "d")
    assert [once.says(1, text) for text in "eda"] == ["", "", ""]
    assert len(once._said[1]) == 4


def _target(client, count, server_round=1):
    update = Update({}, {}, LocalSchedule(0.1, batch_size=100), count)
    return Target.of(Observation(server_round, client, {}, {}, update))


def test_rounds_are_kept_by_client_and_not_by_each_number_that_it_claims():
    history = History(rounds=3)
    for count in range(1, 50):
        assert not history.fuse(_target(5, count)).observation.earlier
    assert len(history.seen) == 1
    history.fuse(_target(5, 49, 2))
    assert len(history.fuse(_target(5, 49, 3)).observation.earlier) == 2
    for client in range(2 * MAX_HISTORY):
        history.fuse(_target(client, 1))
    assert len(history.seen) == MAX_HISTORY
