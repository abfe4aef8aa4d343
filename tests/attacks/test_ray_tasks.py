"""Attacks as Ray tasks; a cluster of two nodes, of which parts are killed, in a process apart."""

import os
import subprocess
import sys

import pytest

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.records import ThreatModel


@pytest.mark.ray
def test_what_is_killed_is_tried_again_and_equal_to_local():
    command = [sys.executable, "-m", "simulations.benchmarks.cluster"]
    ended = subprocess.run(
        [*command, "--targets", "4", "--iterations", "60", "--only", "worker"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = {
        (cells := [cell.strip() for cell in line.split("|")])[1]: cells[2:4]
        for line in ended.stdout.splitlines()
        if line.startswith("| Ray")
    }
    assert set(rows) == {"Ray, a worker killed"}, ended.stderr[-2000:]
    assert rows["Ray, a worker killed"] == ["4 of 4", "1"]


def test_without_a_cluster_it_says_what_to_do(gradient_map, spec, observations, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ray = pytest.importorskip("ray")

    def refuses(**_):
        raise ConnectionError

    monkeypatch.setattr(ray, "init", refuses)
    job = AttackJob(gradient_map, spec, observations, ThreatModel())
    with pytest.raises(ValueError, match="start one by `ray start --head`"):
        Parallel(lambda job, progress: [], RayTasks())(job)


@pytest.mark.parametrize(
    "settings", [{"num_cpus": -1}, {"retries": -1}, {"num_gpus": float("nan")}]
)
def test_senseless_tasks_are_refused(settings):
    with pytest.raises(ValueError, match="must be finite and ≥ 0"):
        RayTasks(**settings)
