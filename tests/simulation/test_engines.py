"""Both commands as a person gives them: a sweep, and the same numbers on either engine."""

import importlib
import logging
import math
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from audits import numbers, tiny_config, values
from audits import run as run_audit

from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.sweep import objective_of
from flwr_leakage.tracking import read_run

ROOT = Path(__file__).parents[2]


def _tiny(folder):
    return [
        "num_clients=2",
        "num_rounds=1",
        "dataset=npz",
        "dataset.name=tiny",
        f"dataset.root={folder}",
        "model=linear",
        "score=gradient_norm",
        "attack=idlg",
        "attack.optimizer.iterations=5",
        "attack.batching=loop",
        "metric=pixel",
        "server.test_samples=10",
    ]


@pytest.fixture
def script(monkeypatch):
    """``python simulations/run.py ARGUMENTS``, without the start of another interpreter."""
    level = logging.getLogger("flwr").level

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        runpy.run_path(str(ROOT / "simulations" / "run.py"), run_name="__main__")

    yield run
    logging.getLogger("flwr").setLevel(level)


def _command(*arguments, cwd, timeout):
    """Run the package in a process group of its own, of which nothing survives."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flwr_leakage.simulation", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    return output


def test_a_sweep_writes_a_run_folder_with_a_report_for_each_point(tiny_data, script, capsys):
    folder = tiny_data / "sweep"
    script("-m", "defense=none,pruning", f"hydra.sweep.dir={folder}", *_tiny(tiny_data))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1"]
    assert capsys.readouterr().out.count("Report: ") == 2
    runs = [read_run(folder / name) for name in "01"]
    for run, name in zip(runs, "01", strict=True):
        assert run.closed
        assert not [event for event in run.events if event.level != "info"]
        assert len([r for r in run.records if r.name == "psnr"]) == 1 + 4  # the clients' images
        assert "</html>" in (folder / name / "report.html").read_text()
    assert [run.metadata["defense"] for run in runs] == ["none", "pruning"]
    assert numbers(runs[0]) != numbers(runs[1])


def test_a_point_of_a_sweep_that_fails_leaves_the_others_alone(tiny_data, script, capsys):
    folder = tiny_data / "failing"
    sweep = [f"hydra.sweep.dir={folder}", "objective=psnr_best", *_tiny(tiny_data)]
    with pytest.raises(SystemExit) as end:
        script("-m", "client.batch_size=0,1", *sweep)
    assert end.value.code == 1
    assert "batch_size must be at least 1, got 0" in (folder / "0" / "failure.txt").read_text()
    assert read_run(folder / "1").closed
    assert (folder / "comparison.html").is_file()
    said = capsys.readouterr()
    assert "failed: client: batch_size must be at least 1, got 0" in said.err
    assert "worst leak, dB" in said.out


def test_a_sweeper_is_told_the_objective(tiny_data):
    run = run_audit(tiny_config(tiny_data, "metric=pixel", name="objective"))
    best = max(value for value in values(run, "psnr").values() if value is not None)
    assert objective_of(run.folder, "psnr_best") == best
    told = objective_of(run.folder, ["psnr_best", "lpips_median"])
    assert told[0] == best
    assert math.isnan(told[1])  # no number
    assert objective_of(run.folder, None) is None


def test_an_objective_that_is_no_measure_is_an_error(tiny_data):
    with pytest.raises(ConfigError, match=r"objective must be among .*, got 'psnr'"):
        build(tiny_config(tiny_data, "objective=psnr"))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("num_round=3", "error: there is no key 'num_round' at the top level (did you mean"),
        ("+foo=3", "error: there is no key 'foo' at the top level"),
        ("num_clients=2.5", "error: num_clients must be an integer, got 2.5."),
    ],
)
def test_what_is_wrong_ends_the_command_in_words(tiny_data, script, argument, said):
    folder = tiny_data / "run"
    arguments = [*_tiny(tiny_data), argument, f"hydra.run.dir={folder}"]
    with pytest.raises(SystemExit) as error:
        script(*arguments)
    assert str(error.value).startswith(said)
    assert not (folder / "records.jsonl").exists()


def test_a_typo_is_told_before_anything_that_a_run_needs_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_leakage.simulation.run", None)
    monkeypatch.delitem(sys.modules, "flwr_leakage.simulation.command", raising=False)
    monkeypatch.setattr(sys, "argv", ["run.py", "num_round=3"])
    with pytest.raises(SystemExit, match="did you mean 'num_rounds'"):
        importlib.import_module("flwr_leakage.simulation.command").main()


@pytest.mark.ray
def test_both_engines_give_the_same_numbers(tiny_data, script):
    """On Ray by the package's own command in a folder that holds nothing of it."""
    folders = {name: tiny_data / name for name in ("ray", "inline", "empty")}
    folders["empty"].mkdir()
    tiny = _tiny(tiny_data)
    script(*tiny, f"hydra.run.dir={folders['inline']}")
    settings = ["engine=ray", "engine.num_cpus=1", f"hydra.run.dir={folders['ray']}"]
    _command(*tiny, *settings, cwd=folders["empty"], timeout=240)
    ray, inline = read_run(folders["ray"]), read_run(folders["inline"])
    assert ray.closed
    assert not [event for event in ray.events if event.level != "info"]
    assert len(ray.records) == len(inline.records)
    assert numbers(ray) == numbers(inline)
    images = [
        sorted(path.name for path in (folders[name] / "images").iterdir())
        for name in ("ray", "inline")
    ]
    assert images[0] == images[1]


@pytest.mark.ray
def test_attacks_run_on_the_cluster_of_the_clients(tiny_data, script):
    """The only CPU is held by the client's actor, and neither waits for the other."""
    tiny = [*_tiny(tiny_data), "num_rounds=2", "selection.every=1", "server.attack_chunk=1"]
    local, ray = tiny_data / "local", tiny_data / "on_ray"
    on_ray = ["engine=ray", "engine.num_cpus=1", "server.attack_workers=ray"]
    script(*tiny, f"hydra.run.dir={local}")
    _command(*tiny, *on_ray, f"hydra.run.dir={ray}", cwd=tiny_data, timeout=600)
    assert len(values(read_run(ray), "objective")) > 2
    assert numbers(read_run(ray)) == numbers(read_run(local))


def test_numbers_do_not_depend_on_how_the_attack_is_run(tiny_data):
    """Three targets in chunks of two, here and with a folder.

    That two processes give the same as one is tested in ``attacks/test_parallel.py``.
    """
    chunks = ["num_rounds=1", "metric=pixel", "server.attack_chunk=2", "attack.batching=vmap"]
    folder = f"server.attack_folder={tiny_data / 'chunks'}"
    alone = run_audit(tiny_config(tiny_data, *chunks, name="alone"))
    kept = run_audit(tiny_config(tiny_data, *chunks, folder, name="kept"))
    workers = build(tiny_config(tiny_data, *chunks, "server.attack_workers=2")).attack
    assert len(values(alone, "objective")) == 3
    assert numbers(alone) == numbers(kept)
    assert replace(workers, workers=1) == build(tiny_config(tiny_data, *chunks)).attack
