"""Clients of unequal size that train by epochs; what a defense would have changed."""

import pytest
from audits import numbers, run, tiny_config, values, write_tiny_data

from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError, compose

UNEQUAL = [
    "partition=sizes",
    "partition.sizes=[1,4,15]",
    "client.num_examples=null",
    "client.num_steps=null",
    "client.epochs=2",
    "client.batch_size=3",
    "selection.max_examples=4",
]
PRUNED = ["what_if={p: {_target_: flwr_leakage.defenses.GradientPruning, prune_ratio: 0.5}}"]


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    data = write_tiny_data(tmp_path_factory.mktemp("unequal"))
    return run(tiny_config(data, *UNEQUAL, *PRUNED, name="unequal"))


def test_each_client_trains_by_its_size(unequal):
    notes = {r.client_id: r.note for r in unequal.records if r.name == "images"}
    assert notes == {
        0: "1 image, 2 steps of 1 image, learning rate 0.1",
        1: "4 images, 4 steps of at most 3 images, learning rate 0.1",
        2: "15 images, 10 steps of 3 images, learning rate 0.1",
    }


def test_large_clients_are_not_attacked_and_the_record_says_why(unequal):
    assert {key[1] for key in values(unequal, "psnr")} == {0, 1}
    [first, second] = [r for r in unequal.records if r.name == "not_attacked"]
    assert (first.client_id, second.client_id) == (2, 2)
    assert first.note == "15 samples, more than the 4 that are attacked at most"


def test_a_what_if_is_measured_in_the_same_rounds_under_its_own_name(unequal):
    assert values(unequal, "p/psnr").keys() == values(unequal, "psnr").keys()
    assert values(unequal, "p/psnr") != values(unequal, "psnr")
    change = values(unequal, "p/relative_change")
    assert len(change) == 4 and all(0 < value < 1 for value in change.values())
    stopped = values(unequal, "p/stopped_by_budget")
    assert stopped == dict.fromkeys(change, 0.0)
    roles = {image.role for image in unequal.images}
    assert roles == {"original", "reconstruction", "what_if_p", "blind_guess"}


def test_a_what_if_has_a_time_limit_of_its_own(tiny_data, unequal):
    limit = "server.what_if_max_seconds=1e-6"
    limited = run(tiny_config(tiny_data, *UNEQUAL, *PRUNED, limit, name="limited"))
    stopped = values(limited, "p/stopped_by_budget")
    assert stopped == dict.fromkeys(values(unequal, "p/stopped_by_budget"), 1.0)
    assert values(limited, "psnr") == values(unequal, "psnr")
    assert not values(limited, "stopped_by_budget")


def test_a_what_if_has_no_influence_on_training_or_on_the_attack(tiny_data, unequal):
    without = run(tiny_config(tiny_data, *UNEQUAL, name="without"))
    asked = [r for r in unequal.records if r.kind != "what_if"]
    assert {(r.name, r.server_round, r.client_id, r.sample): r.value
            for r in asked if r.kind != "cost"} == {
        (r.name, r.server_round, r.client_id, r.sample): r.value
        for r in without.records if r.kind != "cost"
    }  # fmt: skip
    assert len(numbers(without)) < len(numbers(unequal))


def test_what_if_of_nothing_is_the_update_itself_and_undoes_the_own_defense(tiny_data):
    none = "what_if={n: {_target_: flwr_leakage.defenses.NoDefense}}"
    raw = run(tiny_config(tiny_data, *UNEQUAL, none, name="raw"))
    assert values(raw, "n/psnr") == values(raw, "psnr")
    assert set(values(raw, "n/relative_change").values()) == {0.0}
    chosen = ["defense=pruning", "defense.prune_ratio=0.9", "num_rounds=1"]
    pruned = run(tiny_config(tiny_data, *UNEQUAL, none, *chosen, name="pruned"))
    for key, value in values(pruned, "n/psnr").items():
        assert value == pytest.approx(values(raw, "psnr")[key], abs=0.5)


def test_a_what_if_that_cannot_work_is_refused(tiny_data):
    mixed = "what_if={m: {_target_: flwr_leakage.defenses.MixUp, k: 4}}"
    with pytest.raises(ConfigError, match=r"what_if\.m: k must be at most 1"):
        build(tiny_config(tiny_data, *UNEQUAL, mixed))
    with pytest.raises(ConfigError, match=r"what_if\.AB"):
        build(tiny_config(tiny_data, *UNEQUAL, PRUNED[0].replace("{p:", "{AB:")))


def test_an_aggregate_of_clients_with_different_steps_is_refused(tiny_data):
    with pytest.raises(ConfigError, match=r"threat\.view must be single .* 2 to 10 steps"):
        build(tiny_config(tiny_data, *UNEQUAL, "threat.view=aggregate"))


def test_the_default_audit_is_of_unequal_clients_and_its_network_learns(tmp_path):
    quick = ["attack=none", "score=none", "what_if=null", "num_rounds=2", "server.test_samples=300"]
    default = compose([], str(tmp_path / "default"))
    assert default["choices"]["attack"] == "strongest" and list(default["what_if"])
    sizes = build(default).sizes
    assert min(sizes) == 1 and max(sizes) > 100
    accuracy = values(run(compose(quick, str(tmp_path / "run"))), "test_accuracy")
    assert accuracy[0, -1, -1] < 0.3 and accuracy[2, -1, -1] > 0.8


def test_a_gates_limit_of_what_no_score_measures_is_refused(tiny_data):
    with pytest.raises(ConfigError, match=r"gate.scores: .*\(gradient_norm\), got 'gradient_nrom'"):
        build(tiny_config(
            tiny_data, "gate=gradient_norm", "score=gradient_norm",
            "+gate.scores.gradient_nrom=1.0",
        ))  # fmt: skip
