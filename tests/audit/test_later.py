"""Kept updates are attacked later: the same numbers, whatever ends the attack in between."""

import json
import os

import pytest
from audits import numbers, run, tiny_config
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from observed import SPEC, client_app, network
from typer.testing import CliRunner

from flwr_leakage.audit.kept import KeptObservations
from flwr_leakage.cli.app import app
from flwr_leakage.flower import InlineGrid, audit, observe
from flwr_leakage.simulation.later import attack_kept_of_run
from flwr_leakage.tracking import JsonlTracker, jsonl, read_run

SETTINGS = ["defense@what_if.pruning=pruning", "client.same_samples=true", "num_clients=2"]


class Killed(BaseException):
    """In the place of a signal, which ends a process at any moment."""


def later(tiny_data, name, *more):
    config = tiny_config(tiny_data, *SETTINGS, "server.attack_later=true", *more, name=name)
    return config["run_dir"], run(config)


def results(data):
    """What attacks recorded, and what holds of the run besides, by all but the value."""
    return {(*row[:5], row[6]): row[5] for row in json.loads(numbers(data)) if row[3] != "client"}


def same(data, other):
    """Equal but for rounding, as tensors from a file lie elsewhere in memory; none twice."""
    mine, theirs = results(data), results(other)
    count = sum(r.kind not in ("client", "cost") for r in data.records)
    return len(mine) == count and mine == {
        key: value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)
        for key, value in theirs.items()
    }


def test_attacked_later_is_as_attacked_at_once(tiny_data):
    at_once = run(tiny_config(tiny_data, *SETTINGS, name="once"))
    folder, before = later(tiny_data, "later")
    assert not [r for r in before.records if r.kind in ("metric", "what_if", "attack")]
    assert "2 updates of round 1 kept" in str([e.message for e in before.events])
    shown = CliRunner().invoke(app, ["attack-kept", folder])
    assert "2 rounds attacked" in shown.output, shown.output
    after = read_run(folder)
    assert same(after, at_once)
    assert {i.path.name for i in after.images} == {i.path.name for i in at_once.images}
    assert after.closed
    assert attack_kept_of_run(tiny_data / "later", 1, None) == 0


def test_it_goes_on_after_a_kill_at_any_moment(tiny_data, monkeypatch):
    folder, _ = later(tiny_data, "killed", "num_rounds=1")
    whole, _ = later(tiny_data, "whole", "num_rounds=1")
    attack_kept_of_run(tiny_data / "whole", 1, None)
    write, left = os.write, [0]

    def dying(descriptor, line):
        left[0] -= 1
        if left[0] < 0:
            write(descriptor, line[: len(line) // 2])  # the line is torn
            raise Killed
        return write(descriptor, line)

    monkeypatch.setattr(jsonl.os, "write", dying)
    kills = 0
    while True:
        left[0] = 7 * (kills + 1) % 17 + 1
        try:
            attack_kept_of_run(tiny_data / "killed", 1, None)
        except Killed:
            kills += 1
        else:
            break
    assert kills > 2
    found = read_run(folder)
    assert same(found, read_run(whole))
    assert len(found.problems) == kills


def test_what_cannot_be_attacked_later_is_said(tiny_data):
    JsonlTracker(tiny_data / "plain").close()
    for folder, reason in (("plain", "tells no model"), ("none", "run folder")):
        shown = CliRunner().invoke(app, ["attack-kept", str(tiny_data / folder)])
        assert shown.exit_code == 2
        assert reason in shown.output


def test_a_dropped_round_is_recorded(tiny_data):
    _, data = later(tiny_data, "small", "server.kept_bytes=4000", "num_clients=1")
    assert [e.level for e in data.events if "was dropped before it was attacked" in e.message]


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_a_senseless_size_is_refused(tiny_data, value):
    with pytest.raises(ValueError, match=r"server.kept_bytes"):
        run(tiny_config(tiny_data, f"server.kept_bytes={value}", name="bad"))


def test_an_app_of_ones_own_names_its_model(tmp_path):
    folder, seen = tmp_path / "run", tmp_path / "truth"
    keep = KeptObservations(folder / "kept")
    settings = {"keep": keep, "truth": seen, "spec": SPEC}
    strategy = observe(FedAvg(fraction_evaluate=0.0), network(), folder, **settings)
    grid = InlineGrid(audit(client_app(), truth=seen, spec=SPEC), 2)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)
    shown = CliRunner().invoke(
        app, ["attack-kept", str(folder), "--model", "observed:network", "--max-seconds", "0.05"]
    )
    assert "2 rounds attacked" in shown.output, shown.output
    psnr = [r.server_round for r in read_run(folder).records if r.name == "psnr"]
    assert psnr == [1] * 8 + [2] * 8
