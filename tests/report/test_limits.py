"""How far a run looked: whom it attacked, of how many images, and what its time cut off."""

import pytest
from told import metric, objective, spared, with_blind

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.attempts import attempts, fates
from flwr_leakage.report.index import Index
from flwr_leakage.report.verdict import limits_told

LIMITED = {"config": {"server": {"attack_max_seconds": 4.0}}}


def client(number, name, value, sample=-1, server_round=1):
    return LeakageRecord("r", server_round, number, sample, "client", name, value)


def accuracy(server_round, value):
    return LeakageRecord("r", server_round, -1, -1, "utility", "test_accuracy", value)


def told(index, metadata=None):
    return limits_told(index, fates(index), attempts(index), metadata or {})


def test_the_head_counts_whom_and_what_was_left_out_and_what_time_cut_off():
    stopped = LeakageRecord("r", 1, 1, -1, "attack", "stopped_by_budget", 1.0)
    records = [metric(1, 0, 0, 60.0), objective(1, 0, 0.1), metric(1, 1, 0, 11.0)]
    records += [objective(1, 1, 0.1), stopped, spared(1, 2, 30, "too many")]
    records += [client(number, "images", count) for number, count in ((0, 1.0), (1, 4.0), (2, 30))]
    records += [client(number, "image", 1.0, 0) for number in (0, 1)]
    index = with_blind(*records, accuracy(0, 0.1), accuracy(2, 0.935))
    assert told(index, LIMITED) == (
        "Attacked: only 2 of 3 clients, 2 of 35 images used in a round; the others’ images "
        "were not attacked. The time limit of 4 CPU seconds cut off 1 of 2 attacks."
    )


@pytest.mark.parametrize(
    ("records", "metadata", "words"),
    [
        ([metric(1, 0, 0, 60.0)], {}, "Attacked: all of 1 client."),
        ([metric(1, 0, 0, 60.0), objective(1, 0, 0.1)], LIMITED,
         "Attacked: all of 1 client. The time limit of 4 CPU seconds cut off none of 1 attack."),
        # Other images each round: of how many is not known.
        ([*(metric(r, 0, 0, 60.0) for r in (1, 2)), client(0, "images", 1.0),
          client(0, "image", 1.0, 0), client(0, "image", 2.0, 0, 2)], {},
         "Attacked: all of 1 client, 2 images."),
        ([metric(1, -1, 0, 60.0), client(0, "images", 3.0)], {}, ""),
        ([accuracy(0, 0.1)], {}, ""),
        ([spared(1, 0, 3, "no attack is configured")], LIMITED, ""),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_said(records, metadata, words):
    assert told(Index(records), metadata) == words
