"""What was run, in facts and in sentences."""

import pytest
from told import objective, spared

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.attempts import fates
from flwr_leakage.report.index import Index
from flwr_leakage.report.story import (
    describe,
    facts,
    flatten,
    given_to_attacker,
    planned_rounds,
    sentences,
    withheld_from_attacker,
)


def test_the_story_is_told_in_sentences():
    def images(client, count, note):
        return LeakageRecord("r", 1, client, -1, "client", "images", count, "image", "", note)

    records = [images(0, 1, "1 image, 1 step"), images(1, 300, "300 images, 30 steps")]
    records += [objective(1, 0, 0.1), spared(1, 1, 300, "too many")]
    for server_round, value in ((0, 0.1), (1, 0.9)):
        records.append(LeakageRecord("r", server_round, -1, -1, "utility", "test_accuracy", value))
    metadata = {"model": "lenet", "dataset": "digits", "defense": "none", "attack": "best",
                "threat": "labels known"}  # fmt: skip
    index = Index(records)
    told = sentences(index, metadata, fates(index), 1)
    assert told == [
        "2 clients with 1 to 300 images trained a small convolutional network (LeNet) on digits "
        "for 1 round; test accuracy rose from 10.0 % to 90.0 %. No defense was used.",
        "What a client does in a round: client 0: 1 image, 1 step; client 1: 300 images, 30 steps.",
        "The server kept to the protocol and attacked what it received (“honest but curious”) "
        "with the attack “best”: the updates of client 0 in round 1.",
        "Besides the updates and the model it was given: the true labels.",
    ]


def test_a_run_without_an_attack_says_so():
    index = Index([spared(1, 0, 3, "no attack is configured")])
    told = sentences(index, {}, fates(index), 1)
    assert any(text.startswith("No attack was configured") for text in told)


def test_facts_name_what_was_run():
    metadata = {
        "defense": "pruning",
        "seed": 3,
        "config": {
            "dataset": "mnist",
            "defense": {"_target_": "x.y.GradientPruning", "prune_ratio": 0.9, "_x": 1},
            "attack": {
                "_target_": "x.Inversion",
                "objective": {"_target_": "z.Cosine"},
                "tv": True,
                "max_seconds": 120.0,
            },
            "model": None,
        },
    }
    found = {fact.term: (fact.value, fact.settings) for fact in facts(metadata)}
    assert found == {
        "dataset": ("mnist", ""),
        "defense": ("pruning", "prune ratio 0.9"),
        "attack": ("Inversion", "objective Cosine, tv"),
        "seed": ("3", ""),
    }


@pytest.mark.parametrize("metadata", [{}, {"config": None}, {"config": [1]}, {"seed": "x"}])
def test_facts_of_odd_metadata(metadata):
    assert facts(metadata) == []
    assert planned_rounds(metadata) is None
    assert given_to_attacker(metadata) == []


def test_what_the_attacker_is_given_is_told_in_words():
    given = given_to_attacker({"threat": "labels known, batch norm none, something new"})
    assert given == ["the true labels", "something new"]
    withheld = withheld_from_attacker({"threat": "labels inferred, batch norm none"})
    assert withheld[0].startswith("the labels (") and withheld[1:] == [
        "statistics of batch normalisation"
    ]


def test_planned_rounds_are_found_at_the_top_or_in_a_group():
    assert planned_rounds({"config": {"num_rounds": 5}}) == 5
    assert planned_rounds({"config": {"strategy": {"num_rounds": 7}}}) == 7


def test_flatten_names_every_leaf_as_an_override():
    config = {"a": {"b": [1, {"c": None}], "d": {}}, "e": True, "f": 1e-05}
    assert flatten(config) == [
        ("a.b.0", "1"), ("a.b.1.c", "null"), ("a.d", "{}"), ("e", "true"), ("f", "1e-05"),
    ]  # fmt: skip


def test_a_setting_that_is_off_is_told_in_words():
    node = {"_target_": "x.Pruning", "ratio": 0.9, "per_layer": False}
    assert describe(node) == ("Pruning", "ratio 0.9, not per layer")


def test_describe_of_nothing():
    assert describe(None) == ("", "")
    assert describe({"_target_": 3}) == ("", "")
