"""Candidates in a simulation, whose truth the run knows."""

import pytest
from audits import run, tiny_config

from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError

DRAWN = ["membership=drawn", "membership.per_client=1", "membership.strangers=0"]


def test_every_update_is_tested_and_the_truth_recorded(tiny_data):
    overrides = [
        "client.same_samples=true",
        "model=mlp",
        "model.network.hidden_features=[32]",
        "selection.every=1",
    ]
    made = run(tiny_config(tiny_data, *DRAWN, "membership.null_size=20", *overrides))
    rows = {
        (r.server_round, r.client_id, r.sample): r.value
        for r in made.records
        if r.name == "membership_truth"
    }
    assert len(rows) == 2 * 3 * 3
    assert {key[1:] for key, value in rows.items() if value} == {(0, 0), (1, 1), (2, 2)}
    exact = {
        (r.server_round, r.client_id, r.sample)
        for r in made.records
        if r.name == "membership_exact"
    }
    assert exact == {key for key, value in rows.items() if value}


def test_a_null_that_is_too_small_is_an_error_before_the_run(tiny_data):
    config = tiny_config(tiny_data, *DRAWN, "membership.null_size=19")
    with pytest.raises(ConfigError, match="null_size must be at least 20, got 19"):
        build(config)


def test_clients_test_their_own_updates_under_a_gate(tiny_data):
    overrides = [
        "score=own_records",
        "score.own_records.null.count=20",
        "scoring.relative_cost=null",
        "num_rounds=1",
    ]
    sent = run(tiny_config(tiny_data, *overrides)).records
    found = [record for record in sent if record.name == "membership_corrected"]
    assert len(found) == 3 and {record.state for record in found} == {"upper bound"}
    assert any(record.kind == "attack" for record in sent)
    # So few null records cannot show that nothing is found: nothing is sent.
    gated = ["gate=own_records", "gate.stronger=[]"]
    kept_back = run(tiny_config(tiny_data, *overrides, *gated, name="gated")).records
    assert not any(record.kind == "attack" for record in kept_back)
