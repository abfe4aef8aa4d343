"""Shards of kept updates, attacked apart and merged, are the run that was attacked whole."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from audits import run, tiny_config, write_tiny_data
from typer.testing import CliRunner

from flwr_leakage.audit import kept as kept_files
from flwr_leakage.audit.shards import Shard, attack_shard, merge_shards
from flwr_leakage.cli.app import app
from flwr_leakage.simulation.later import attack_kept_of_run, kept_run
from flwr_leakage.tracking import read_run

SETTINGS = [
    "what_if={p: {_target_: flwr_leakage.defenses.GradientPruning, prune_ratio: 0.5}}",
    "server.attack_later=true", "server.attack_chunk=1", "num_clients=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with data and the run ``kept``, and the numbers that attacking it whole gives."""
    data = write_tiny_data(tmp_path_factory.mktemp("shards"))
    run(tiny_config(data, *SETTINGS, name="kept"))
    shutil.copytree(data / "kept", data / "whole")
    attack_kept_of_run(data / "whole", 1, None, [data])
    return data, results(data / "whole")


def results(folder):
    found = read_run(folder)
    assert found.closed
    told = [
        (r.server_round, r.client_id, r.sample, r.kind, r.name, r.value)
        for r in found.records
        if r.kind != "cost"
    ]
    return sorted(map(str, [*told, *(image.path.name for image in found.images)]))


@pytest.fixture
def copy(made, tmp_path):
    """A fresh copy of the run, with what names its kept observations."""
    data, _ = made
    shutil.copytree(data / "kept", tmp_path / "run")
    return kept_run(tmp_path / "run", None, [data])


def test_merged_shards_are_the_whole_run_to_the_bit(made, copy, tmp_path):
    data, whole = made
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(copy.folder, elsewhere)  # another machine
    counts = [attack_shard(copy, Shard(1, 2))]
    away = kept_run(elsewhere, None, [data])
    counts.append(attack_shard(away, Shard(2, 2), tmp_path / "second"))
    assert counts == [6, 6]  # three clients in two rounds, each under a what-if too
    before = (copy.folder / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match="missing: 2/2"):
        merge_shards(copy)
    assert (copy.folder / "records.jsonl").read_bytes() == before
    shutil.copytree(tmp_path / "second", copy.folder / "kept" / "shards" / "2-of-2")
    shown = CliRunner().invoke(app, ["merge", str(copy.folder), "--allow", str(data)])
    assert "2 rounds recorded" in shown.output, shown.output
    assert results(copy.folder) == whole
    after = (copy.folder / "records.jsonl").read_bytes()
    assert merge_shards(copy) == 0
    assert (copy.folder / "records.jsonl").read_bytes() == after


@pytest.mark.ray
def test_a_cluster_attacks_what_was_kept_to_the_bit(made, tmp_path):
    """``attack-kept --workers ray`` as a person calls it, while a cluster of one node runs."""
    data, whole = made
    shutil.copytree(data / "kept", tmp_path / "run")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        command = [sys.executable, "-m", "flwr_leakage.cli", "attack-kept", str(tmp_path / "run")]
        ended = subprocess.run(
            [*command, "--workers", "ray", "--allow", str(data)], capture_output=True, text=True,
            timeout=600, env={**os.environ, "RAY_ADDRESS": cluster.address},
        )  # fmt: skip
    finally:
        cluster.shutdown()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert results(tmp_path / "run") == whole


def test_a_shard_goes_on_where_it_was_ended(copy):
    attack_shard(copy, Shard(1, 1))
    (place,) = (copy.folder / "kept" / "shards").iterdir()
    files = sorted((place / "finished").iterdir())
    times = {path.name: path.stat().st_mtime_ns for path in files[1:]}
    files[0].unlink()
    (place / "shard.json").unlink()
    with pytest.raises(ValueError, match="has not ended"):
        merge_shards(copy)
    attack_shard(copy, Shard(1, 1))
    assert all((place / "finished" / name).stat().st_mtime_ns == t for name, t in times.items())
    assert merge_shards(copy) == 2


def test_what_does_not_fit_is_refused_in_words(made, copy, tmp_path):
    data, _ = made
    attack_shard(copy, Shard(1, 1))
    (place,) = (copy.folder / "kept" / "shards").iterdir()
    (place / "finished" / sorted(p.name for p in (place / "finished").iterdir())[0]).unlink()
    with pytest.raises(ValueError, match=r"shard 1/1 lacks 1 of its 12 targets: call it again"):
        merge_shards(copy)
    run(tiny_config(data, *SETTINGS, "seed=5", name="other"))
    other = kept_run(data / "other", None, [data])
    with pytest.raises(ValueError, match="lacks 12 of its 12 targets: it is of another run"):
        merge_shards(other, [place])
    shutil.copytree(place, tmp_path / "half")
    (tmp_path / "half" / "shard.json").write_text(
        json.dumps({"format": "flwr-leakage shard, version 1", "index": 1, "of": 2})
    )
    with pytest.raises(ValueError, match=r"of one division, got some of \[1, 2\]"):
        merge_shards(copy, [place, tmp_path / "half"])
    with pytest.raises(ValueError, match="must be given once"):
        merge_shards(copy, [place, place])


@pytest.mark.parametrize("told", ["[]", "{", '{"format": "x"}', '{"index": "1"}', ""])
def test_a_manifest_of_anybody_is_refused_in_words(copy, tmp_path, told):
    (tmp_path / "shard.json").write_text(told)
    with pytest.raises(ValueError, match=r"cannot be read"):
        merge_shards(copy, [tmp_path])


def test_files_of_anybody_are_not_followed_or_believed(copy, tmp_path):
    attack_shard(copy, Shard(1, 1))
    (place,) = (copy.folder / "kept" / "shards").iterdir()
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    linked, torn, *_ = sorted((place / "finished").iterdir())
    linked.unlink()
    linked.symlink_to(secret)
    torn.write_bytes(torn.read_bytes()[:50])
    with pytest.raises(ValueError, match="lacks 2 of its 12 targets"):
        merge_shards(copy)


def test_a_client_of_an_unknown_normalisation_has_no_shards(copy, monkeypatch):
    read = kept_files.KeptObservations.read

    def unknown(self, number):
        several, problems = read(self, number)
        for each in several:
            object.__setattr__(each.inputs.spec, "known", False)
        return several, problems

    monkeypatch.setattr(kept_files.KeptObservations, "read", unknown)
    with pytest.raises(ValueError, match="normalisation of client 0 must be known in round 1"):
        attack_shard(copy, Shard(1, 2))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_senseless_shard_is_refused(copy, text):
    shown = CliRunner().invoke(app, ["attack-kept", str(copy.folder), "--shard", text])
    assert shown.exit_code == 2
    assert "shard must be" in shown.output


def test_each_round_is_shared_evenly():
    for of in (1, 3, 16):
        taken = [Shard(1, of).owner(r, i).index for r in range(1, 5) for i in range(of)]
        assert all(taken.count(index) == 4 for index in range(1, of + 1))
