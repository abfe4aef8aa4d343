"""Kept updates are attacked later: the same numbers, whatever ends the attack in between."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from audits import numbers, run, tiny_config, values
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from observed import SPEC, client_app, network
from observed import audit as observed_audit
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from flwr_leakage.attacks.problem import pose
from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.audit.kept import FORMAT, KeptObservations
from flwr_leakage.audit.later import KeptRun, attack_kept
from flwr_leakage.cli.app import app
from flwr_leakage.flower import InlineGrid, audit, observe
from flwr_leakage.records import Reconstruction, ThreatModel
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError, compose
from flwr_leakage.simulation.later import FORMER, attack_kept_of_run, received_config
from flwr_leakage.simulation.weights import last_buffers
from flwr_leakage.tracking import JsonlTracker, jsonl, read_run, write_metadata

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
    shown = CliRunner().invoke(app, ["attack-kept", folder, "--allow", str(tiny_data)])
    assert "2 rounds attacked" in shown.output, shown.output
    after = read_run(folder)
    assert same(after, at_once)
    assert {i.path.name for i in after.images} == {i.path.name for i in at_once.images}
    assert after.closed
    assert attack_kept_of_run(tiny_data / "later", 1, None, [tiny_data]) == 0


def test_it_goes_on_after_a_kill_at_any_moment(tiny_data, monkeypatch):
    folder, _ = later(tiny_data, "killed", "num_rounds=1")
    whole, _ = later(tiny_data, "whole", "num_rounds=1")
    attack_kept_of_run(tiny_data / "whole", 1, None, [tiny_data])
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
            attack_kept_of_run(tiny_data / "killed", 1, None, [tiny_data])
        except Killed:
            kills += 1
        else:
            break
    assert kills > 2
    found = read_run(folder)
    assert same(found, read_run(whole))
    assert found.closed
    assert len(found.problems) == kills


MIXED = ["defense=mixup", "defense.k=2", "threat.labels=known", "threat.mixing=known"]


@pytest.mark.parametrize(
    ("more", "images"),
    [
        (["client.same_samples=false"], 2),
        (["client.num_examples=2", "client.batch_size=2", *MIXED], 2),
    ],
)
def test_calls_after_each_round_are_as_one_call(tiny_data, more, images):
    folders = [Path(later(tiny_data, n, "num_clients=1", *more)[0]) for n in ("one", "each")]
    attack_kept_of_run(folders[0], 1, None, [tiny_data])
    second = folders[1] / "kept" / "round000002"
    waiting = second.rename(tiny_data / "waiting")
    assert attack_kept_of_run(folders[1], 1, None, [tiny_data]) == 1
    waiting.rename(second)
    assert attack_kept_of_run(folders[1], 1, None, [tiny_data]) == 1
    one, each = map(read_run, folders)
    assert same(each, one)
    assert values(each, "image") == values(one, "image")
    assert max(values(one, "image").values()) == images
    decoded = values(one, "decoded_encodings")
    assert values(each, "decoded_encodings") == decoded
    assert list(decoded.values()) == ([2, 4] if "threat.mixing=known" in more else [])


def test_numbers_go_on_where_the_attacked_round_was_dropped(tiny_data):
    folder = Path(later(tiny_data, "run", "client.same_samples=false", "num_clients=1")[0])
    waiting = (folder / "kept" / "round000002").rename(tiny_data / "waiting")
    attack_kept_of_run(folder, 1, None, [tiny_data])
    waiting.rename(folder / "kept" / "round000002")
    shutil.rmtree(folder / "kept" / "round000001")
    attack_kept_of_run(folder, 1, None, [tiny_data])
    assert list(values(read_run(folder), "image").values()) == [1, 2]


def test_without_work_the_record_stays_as_it_is(tiny_data):
    folder = Path(later(tiny_data, "run", "num_rounds=1")[0])
    before = (folder / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match="must have an attack, got None"):
        attack_kept(KeptRun(folder, observed_audit))
    assert (folder / "records.jsonl").read_bytes() == before
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 1
    before = (folder / "records.jsonl").read_bytes()
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 0
    assert (folder / "records.jsonl").read_bytes() == before


def test_a_run_that_still_goes_on_is_not_closed(tiny_data):
    folder = Path(later(tiny_data, "run", "num_rounds=1")[0])
    JsonlTracker(folder, resume=True).flush()
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 1
    assert not read_run(folder).closed


def test_a_round_may_be_dropped_while_it_is_attacked(tiny_data, monkeypatch):
    folder = Path(later(tiny_data, "run")[0])
    attack = ServerAudit.attack_round

    def dropping(self, server_round, *rest):
        attack(self, server_round, *rest)
        if server_round == 1:
            shutil.rmtree(folder / "kept" / "round000001")

    monkeypatch.setattr(ServerAudit, "attack_round", dropping)
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 2
    data = read_run(folder)
    (said,) = [e for e in data.events if "dropped while it was attacked" in e.message]
    assert said.server_round == 1
    assert {key[0] for key in values(data, "psnr")} == {1, 2}


@pytest.mark.parametrize("view", ["single", "aggregate"])
def test_a_round_with_unreadable_files_stays_to_be_attacked(tiny_data, view):
    folder = Path(later(tiny_data, "run", "num_rounds=1", f"threat.view={view}")[0])
    spoilt = folder / "kept" / "round000001" / "client0001.safetensors"
    whole = spoilt.read_bytes()
    spoilt.write_bytes(whole[:-20])
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 0
    data = read_run(folder)
    assert len([e for e in data.events if "not noted" in e.message or "its mean" in e.message]) == 1
    assert {key[1] for key in values(data, "psnr")} == ({0} if view == "single" else set())
    spoilt.write_bytes(whole)
    assert attack_kept_of_run(folder, 1, None, [tiny_data]) == 1
    data = read_run(folder)
    assert {key[1] for key in values(data, "psnr")} == ({0, 1} if view == "single" else {-1})
    assert data.closed


def test_what_cannot_be_attacked_later_is_said(tiny_data):
    JsonlTracker(tiny_data / "plain").close()
    for folder, reason in (("plain", "tells no model"), ("none", "run folder")):
        shown = CliRunner().invoke(app, ["attack-kept", str(tiny_data / folder)])
        assert shown.exit_code == 2
        assert reason in shown.output


def test_a_dropped_round_is_recorded(tiny_data):
    _, data = later(tiny_data, "small", "server.kept_bytes=4000", "num_clients=1")
    assert [e.level for e in data.events if "was dropped before it was attacked" in e.message]
    assert [e.message for e in data.events if "room for some 1 round" in e.message]


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_a_senseless_size_is_refused(tiny_data, value):
    with pytest.raises(ValueError, match=r"server.kept_bytes"):
        run(tiny_config(tiny_data, f"server.kept_bytes={value}", name="bad"))


def test_a_path_outside_of_the_folder_is_named_by_its_reader(tiny_data):
    folder, _ = later(tiny_data, "run", "num_rounds=1")
    shown = CliRunner().invoke(app, ["attack-kept", folder])
    assert shown.exit_code == 2
    assert f"dataset.root must lie inside of the run folder, got '{tiny_data}'" in shown.output
    assert f"--allow {tiny_data}" in shown.output
    assert attack_kept_of_run(Path(folder), 1, None, [tiny_data]) == 1


def test_what_a_strangers_config_would_start_or_write_is_left_out(tiny_data):
    more = ["tracker=tensorboard", "client.folder=/x", f"model.weights={tiny_data / 'no'}"]
    config = tiny_config(tiny_data, *SETTINGS, *more) | dict.fromkeys(FORMER, "x")
    write_metadata(tiny_data / "run", config, 0)
    found = received_config(tiny_data / "run", [tiny_data])
    assert not set(FORMER) & found.keys()
    assert found["tracker"] == {} and found["run_dir"] == str(tiny_data / "run")
    assert found["client"]["folder"] is None and found["model"]["weights"] is None
    assert found["engine"] == compose(["engine=inline"], "x")["engine"]


def test_a_model_is_not_imported_from_the_run_folder(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    JsonlTracker(folder).close()
    (folder / "stranger.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(folder)
    shown = CliRunner().invoke(app, ["attack-kept", str(folder), "--model", "stranger:Net"])
    assert "from the folder of your own code" in shown.output


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_steps", 10**9, "at most 1,000,000 steps"),
        ("num_steps", 2.5, "num_steps must be an integer"),
        ("shape", [1, 10**5, 10**5], "an input must have at most 16,777,216 numbers"),
        ("num_examples", 10**12, "those of an update"),
        ("server_round", 2, "it must be of round 1, got 2"),
        ("client_id", "x", "client_id must be an integer"),
        ("mean", ["x"], "mean must be finite numbers"),
    ],
)
def test_a_kept_round_claims_what_memory_can_hold(unchecked, tiny_data, key, value, said):
    folder = Path(later(tiny_data, "run", "num_rounds=1", "num_clients=1")[0])
    path = folder / "kept" / "round000001" / "client0000.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["observation"])
    about["schedule"]["batch_size"] = 10**9
    section = next(s for s in (about["schedule"], about["spec"], about) if key in s)
    section[key] = value
    save_file(tensors, path, {"format": FORMAT, "observation": json.dumps(about)})
    found, (problem,) = KeptObservations(folder / "kept").read(1)
    assert not found and said in problem


def test_an_app_of_ones_own_names_its_model(tmp_path):
    folder, seen = tmp_path / "run", tmp_path / "truth"
    keep = KeptObservations(folder / "kept")
    settings = {"keep": keep, "truth": seen, "spec": SPEC}
    strategy = observe(FedAvg(fraction_evaluate=0.0), network(), folder, **settings)
    grid = InlineGrid(audit(client_app(), truth=seen, spec=SPEC), 2)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)
    shown = CliRunner().invoke(
        app,
        [
            "attack-kept",
            str(folder),
            "--model",
            "observed:network",
            "--attack",
            "idlg",
            "--max-seconds",
            "0.05",
        ],
    )
    assert "2 rounds attacked" in shown.output, shown.output
    psnr = [r.server_round for r in read_run(folder).records if r.name == "psnr"]
    assert psnr == [1] * 8 + [2] * 8


def test_statistics_of_the_finished_model_are_known_after_training_only(tiny_data):
    network = ["model=resnet8", "model.network.width=1", "model.batch_norm=batch", "what_if=null"]
    final = [*network, "threat.batch_norm=final", "num_clients=1"]
    with pytest.raises(ConfigError, match=r"takes server\.attack_later=true"):
        build(tiny_config(tiny_data, *final))
    folder, _ = later(tiny_data, "final", *final)
    kept = KeptObservations(Path(folder) / "kept").read(1)[0][0].observation
    assert not kept.buffers["bn1.running_mean"].any()  # what the server sent in round 1
    given = []

    def attack(job, progress=None):
        given.extend(job.observations)
        return [Reconstruction(None, 0.0, error="none") for _ in job.observations]

    config = {**read_run(folder).metadata["config"], "run_dir": folder}

    def audit_of(tracker):
        made = build(config).server_audit(tracker, "final", ConsoleProgress())
        made.attack = attack
        return made

    with pytest.raises(ValueError, match="buffers of the finished model, got none"):
        attack_kept(KeptRun(Path(folder), audit_of))
    last = last_buffers(Path(folder), build(config).network)
    assert attack_kept(KeptRun(Path(folder), audit_of, final_buffers=last)) == 2
    assert [seen.server_round for seen in given] == [1, 2]
    threat = ThreatModel(batch_norm="final")
    for seen in given:
        posed = pose(build(config).gradient_map, build(config).spec, seen, threat)
        assert posed.gradient_map.batch_norm == "running"
        assert all(torch.equal(posed.buffers[name], value) for name, value in last.items())
    with pytest.raises(ValueError, match="attack them after training"):
        pose(build(config).gradient_map, build(config).spec, kept, threat)
