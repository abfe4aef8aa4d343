import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from flwr_leakage.tracking import metadata as metadata_module
from flwr_leakage.tracking import read_run, write_metadata
from flwr_leakage.tracking.metadata import as_json, project_commit


def test_what_is_written_is_read_again(tmp_path):
    config = {
        "attack": {"lr": 0.1, "bound": math.inf, "steps": (1, 2)},
        "root": Path("a/b"),
        3: None,
    }
    path = write_metadata(tmp_path / "run", config, 7, {"run": "demo", "threat": "labels known"})
    assert path == tmp_path / "run" / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600
    metadata = read_run(tmp_path / "run").metadata
    assert metadata["config"] == {
        "attack": {"lr": 0.1, "bound": "inf", "steps": [1, 2]}, "root": "a/b", "3": None,
    }  # fmt: skip
    assert metadata["seed"] == 7
    assert metadata["threat"] == "labels known"
    assert {"python", "torch", "flwr", "numpy", "torchvision"} <= metadata["versions"].keys()
    assert {"commit", "dirty", "start_time", "platform", "command"} <= metadata.keys()


def test_it_is_strict_json(tmp_path):
    path = write_metadata(tmp_path, {"a": math.nan, "b": [-math.inf]}, 0)

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(path.read_text(), parse_constant=refuse)["config"] == {
        "a": "nan",
        "b": ["-inf"],
    }


def test_extra_may_not_replace_what_is_written_here(tmp_path):
    with pytest.raises(ValueError, match=r"must not have the keys .*got \['commit'\]"):
        write_metadata(tmp_path, {}, 0, {"commit": "deadbeef"})


def test_a_broken_file_is_named_and_left_out(tmp_path):
    (tmp_path / "run.json").write_text('{"seed": ')
    with pytest.warns(UserWarning, match=r"run\.json cannot be read"):
        assert read_run(tmp_path).metadata == {}


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_is_that_of_the_checkout_that_tracks_the_package(tmp_path, monkeypatch):
    source = tmp_path / "metadata.py"
    source.write_text("")
    monkeypatch.setattr(metadata_module, "__file__", str(source))
    git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-q", "-m", "one")
    assert project_commit() == (None, None)  # as in an environment inside a checkout

    git(tmp_path, "add", "metadata.py")
    git(tmp_path, "commit", "-q", "-m", "two")
    commit, dirty = project_commit()
    assert commit is not None and len(commit) == 40 and dirty is False
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    os.utime(source, (1, 1))  # git would note it in the index, and lock that on a full disk
    assert project_commit() == (commit, False)
    assert index.read_bytes() == before
    source.write_text("changed")
    assert project_commit() == (commit, True)


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert project_commit() == (None, None)


def test_as_json_keeps_booleans_and_text():
    assert as_json({"a": True, "b": "x", "c": [None, 1]}) == {"a": True, "b": "x", "c": [None, 1]}
