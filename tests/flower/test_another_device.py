"""Models, losses and batches on a GPU: every door takes them, and answers as on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from flwr_leakage.tracking import read_run

SUPPORT = Path(__file__).parents[1] / "support"

NEEDS = {
    "accel": pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch lets no Python code register a device",
    ),
    "cuda": pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=needs) for name, needs in NEEDS.items()]
)
def answers(request, tmp_path_factory):
    """What was printed, and the folder of the runs; in a process of its own, as a device stays."""
    folder = tmp_path_factory.mktemp("runs")
    paths = os.pathsep.join(
        [str(SUPPORT.parents[1]), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "doors_on_accelerator.py"), str(folder), request.param],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    return json.loads(line), folder


def test_scores_attack_and_membership_answer_as_on_the_cpu(answers):
    (cpu, there), _ = answers
    assert there["scores"]["norm"] == pytest.approx(cpu["scores"]["norm"])
    assert there["scores"]["lambda"] == pytest.approx(cpu["scores"]["lambda"], rel=1e-3)
    for found in (cpu, there):
        assert found["objective"] < 1e-9
        assert found["image_error"] < 1e-3
        assert found["exact"] == [True, True, False, False, False]


def test_an_app_that_trains_there_is_replayed_scored_and_defended(answers):
    _, folder = answers
    cpu, there = map(read_run, sorted(folder.iterdir(), key=lambda each: each.name != "cpu"))
    values = [
        {
            (r.name, r.client_id, r.sample): r.value
            for r in run.records
            if r.value is not None and "seconds" not in r.name
        }
        for run in (cpu, there)
    ]
    assert len([key for key in values[0] if key[0] == "input_gradient_norm"]) == 8
    assert ("replay_residual", 0, -1) in values[0]
    for key, value in values[0].items():
        assert values[1][key] == pytest.approx(value, rel=1e-5), key
    heard = [{event.message for event in run.events} for run in (cpu, there)]
    assert heard[0] == heard[1] and len(heard[0]) == 4  # two of each client
    assert any("says: The update was defended by GradientPruning." in text for text in heard[0])
    assert any("the cross-entropy with class weights, assumed" in text for text in heard[0])
