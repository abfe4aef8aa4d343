"""What a run needs of its machine is tried before the run, and said in a sentence."""

import errno
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from audits import TINY, run, tiny_config

from flwr_leakage.records import RunEvent
from flwr_leakage.simulation import command, machine, summary
from flwr_leakage.simulation import run as by_hydra
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.machine import check_machine
from flwr_leakage.simulation.run import IncompleteRunError, check_complete
from flwr_leakage.tracking import JsonlTracker, read_run
from flwr_leakage.tracking.guarded import LOST

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("run_dir", "said"),
    [
        ("/proc/x", "got /proc/x: No such file or directory"),
        ("{root}/tiny_train.npz", "tiny_train.npz, which is a file"),
        ("{root}/tiny_train.npz/run", "tiny_train.npz/run: "),
        ("{root}/" + "a" * 300, "File name too long"),
        ("{root}/a\0b", "null"),
        ("", "got ''"),
        ("  ", "got '  '"),
    ],
)
def test_what_cannot_be_a_run_folder_is_said(tiny_data, run_dir, said):
    config = tiny_config(tiny_data) | {"run_dir": run_dir.replace("{root}", str(tiny_data))}
    with pytest.raises(ConfigError, match="(?s)run_dir must name a folder .*" + said):
        check_machine(build(config))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_takes_no_file_is_said(tiny_data, monkeypatch, number):
    def refuse(path, content):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(machine, "write_private", refuse)
    with pytest.raises(ConfigError, match=f"run_dir must .*: {os.strerror(number)}"):
        check_machine(build(tiny_config(tiny_data)))


def test_a_folder_is_left_as_it_was_found(tiny_data):
    check_machine(build(tiny_config(tiny_data)))
    assert list((tiny_data / "run").iterdir()) == []
    JsonlTracker(tiny_data / "run").close()
    with pytest.raises(ConfigError, match=r"run_dir must be a new folder, .* which holds a run"):
        check_machine(build(tiny_config(tiny_data)))


@pytest.mark.parametrize("key", ["client.folder", "server.attack_folder"])
def test_other_folders_are_tried_as_well(tiny_data, key):
    with pytest.raises(ConfigError, match=f"{key} must name a folder that can be written"):
        check_machine(build(tiny_config(tiny_data, f"{key}=/proc/x")))


def test_a_backbone_that_is_named_must_be_one(tiny_data):
    (tiny_data / "text.pth").write_text("no weights")
    for given in ("/nowhere", tiny_data / "text.pth"):
        config = tiny_config(tiny_data, f"metric.lpips.backbone={given}")
        with pytest.raises(ConfigError, match=f"backbone must be a file .* got {given}: cannot"):
            check_machine(build(config))


def test_hydras_own_folder_is_tried_before_hydra_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for arguments in (["hydra.run.dir=/proc/x/${now:%Y}"], ["-m", "hydra.sweep.dir=file/x"]):
        assert "must name a folder that can be made, got" in command.output_problem(arguments)
    assert command.output_problem(["--cfg", "job"]) == ""
    assert not (tmp_path / "outputs").exists()
    assert command.output_problem([]) == command.output_problem(["-m"]) == ""
    (tmp_path / "outputs").rmdir()
    (tmp_path / "outputs").touch()
    assert command.output_problem([]).startswith("hydra.run.dir must name a folder")


def test_a_full_disk_and_a_plain_terminal_end_a_run_with_a_sentence(tiny_data):
    """A run as its own process, whose files may have a greatest size and whose output is ASCII."""

    def limit():  # run.json fits, the record and the report do not
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    data = ["dataset=npz", "dataset.name=tiny", f"dataset.root={tiny_data}", "metric=pixel"]
    folders = [f"run_dir={tiny_data}/full", f"hydra.run.dir={tiny_data}/hydra"]
    ended = subprocess.run(
        [sys.executable, "-m", "flwr_leakage.simulation", *TINY, *data, *folders],
        capture_output=True, timeout=280, preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )  # fmt: skip
    said = ended.stderr.decode("ascii")
    assert ended.returncode == 1
    assert "Traceback" not in said
    assert b"3 clients ? 2 rounds" in ended.stdout
    assert f"error: the run in {tiny_data}/full is incomplete: its record is not closed" in said
    assert "its report was not written. What was written can be read" in said
    with pytest.warns(UserWarning, match="is left out"):  # the line that was cut
        data = read_run(tiny_data / "full")
    assert data.records and data.metadata and not data.closed


def test_a_run_is_complete_with_its_record_and_report_only(tiny_data):
    data = run(tiny_config(tiny_data), page=True)
    check_complete(data)
    lost = RunEvent("run", 1, -1, "error", f"3 {LOST}, as JsonlTracker could not record them.")
    for change, said in (
        ({"closed": False}, "its record is not closed"),
        ({"events": (lost,)}, "3 entries were lost"),
        ({"folder": tiny_data}, "its report was not written"),
    ):
        with pytest.raises(IncompleteRunError, match=said):
            check_complete(replace(data, **change))


def test_an_error_of_the_disk_is_a_sentence_of_the_command(tiny_data, monkeypatch, capsys):
    def full(config):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(by_hydra, "launch", full)
    folders = [f"run_dir={tiny_data}/full", f"hydra.run.dir={tiny_data}/hydra"]
    monkeypatch.setattr("sys.argv", ["run.py", *folders])
    with pytest.raises(SystemExit) as ended:
        by_hydra.run_by_hydra()
    assert ended.value.code == (
        f"error: the run in {tiny_data}/full cannot be written or read: [Errno 28] No space left "
        "on device"
    )


def test_a_broken_run_that_cannot_be_closed_is_said(tmp_path, monkeypatch, capsys):
    JsonlTracker(tmp_path)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(summary, "write_report", full)
    summary.close_broken_run(tmp_path, "it was ended from outside")
    assert "could not be closed, though it was ended from outside" in capsys.readouterr().out
