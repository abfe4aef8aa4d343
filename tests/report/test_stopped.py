"""The verdict tells where a time limit, and not the attack, ended the search."""

from audits import run, tiny_config, values

from flwr_leakage.report.index import Index
from flwr_leakage.report.verdict import judge


def test_attacks_that_a_budget_ended_are_told(tiny_data):
    asked = "what_if={p: {_target_: flwr_leakage.defenses.GradientPruning, prune_ratio: 0.5}}"
    hurried = run(tiny_config(tiny_data, "server.attack_max_seconds=0.001", asked, name="hurried"))
    stopped = values(hurried, "stopped_by_budget")
    assert len(stopped) == len(values(hurried, "objective")) == 6
    assert set(values(hurried, "p/stopped_by_budget").values()) == {1.0}
    details = judge(Index(hurried.records), hurried.events).details
    assert any("ended the attack on 6 of 6 updates" in text for text in details)
    calm = run(tiny_config(tiny_data, name="calm"))
    assert not values(calm, "stopped_by_budget")
    assert not any("time limit" in text for text in judge(Index(calm.records), calm.events).details)
