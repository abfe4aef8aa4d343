"""``simulations/run.py`` as a person runs it: both engines give the same numbers; a sweep."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from audits import numbers

from flwr_leakage.tracking import read_run

ROOT = Path(__file__).parents[2]
TINY = [
    "num_clients=2",
    "num_rounds=1",
    "dataset=embedded_mnist",
    "model=linear",
    "score=gradient_norm",
    "attack=idlg",
    "attack.optimizer.iterations=5",
    "attack.batching=loop",
    "metric=pixel",
    "server.test_samples=10",
]


def _simulate(*arguments, timeout):
    """Run the script in a process group of its own, of which nothing survives."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "simulations" / "run.py", *arguments, *TINY],
        cwd=ROOT,
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


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    output = _simulate("-m", "defense=none,pruning", f"hydra.sweep.dir={folder}", timeout=120)
    return folder, output


def test_a_sweep_writes_a_run_folder_with_a_report_for_each_point(sweep):
    folder, output = sweep
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1"]
    assert output.count("Report: ") == 2
    runs = [read_run(folder / name) for name in "01"]
    for run, name in zip(runs, "01", strict=True):
        assert run.closed
        assert not run.events
        assert len([record for record in run.records if record.name == "psnr"]) == 2
        assert "</html>" in (folder / name / "report.html").read_text()
    assert [run.metadata["defense"] for run in runs] == ["none", "pruning"]
    assert numbers(runs[0]) != numbers(runs[1])


@pytest.mark.ray
def test_both_engines_give_the_same_numbers(sweep, tmp_path):
    folder, _ = sweep
    settings = ["engine=ray", "engine.num_cpus=1", f"hydra.run.dir={tmp_path / 'ray'}"]
    _simulate(*settings, timeout=240)
    ray, inline = read_run(tmp_path / "ray"), read_run(folder / "0")
    assert ray.closed
    assert not ray.events
    assert len(ray.records) == len(inline.records)
    assert numbers(ray) == numbers(inline)
    images = [
        sorted(path.name for path in (r / "images").iterdir())
        for r in (tmp_path / "ray", folder / "0")
    ]
    assert images[0] == images[1]
