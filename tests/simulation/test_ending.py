"""How a run ends: by a signal, on a full disk, with files that only their owner reads."""

import errno
import io
import os
import signal
import stat
import time

import pytest
from audits import run, tiny_config, values
from flwr.clientapp import ClientApp
from rich.console import Console

from flwr_leakage.flower import run_inline
from flwr_leakage.records import LeakageRecord
from flwr_leakage.simulation import command
from flwr_leakage.simulation import run as by_hydra
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.summary import close_broken_run
from flwr_leakage.simulation.watch import closed_afterwards
from flwr_leakage.tracking import JsonlTracker, read_run


@pytest.fixture
def _default_sigterm():
    """Ray, once started in this process, leaves a handler of SIGTERM behind."""
    left = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, left)


@pytest.mark.usefixtures("_default_sigterm")
def test_a_sigterm_leaves_a_closed_run_with_a_report_that_says_so(tiny_data):
    config = tiny_config(tiny_data)
    honest, app = make_client_app(lambda _: build(config)), ClientApp()

    @app.train()
    def train(message, context):
        if message.content["config"]["server-round"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(message, context)

    with pytest.raises(SystemExit) as ended:
        run(config, app, page=True)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    data = read_run(config["run_dir"])
    assert data.closed
    assert len(values(data, "psnr")) == 3
    assert [(e.level, e.server_round) for e in data.events] == [("error", 2)]
    assert "ended early: SystemExit: 143" in (tiny_data / "run" / "report.html").read_text()


def test_a_run_that_its_server_left_open_is_closed_from_outside(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(LeakageRecord("r", 1, 0, 0, "metric", "psnr", 20.0, "dB"))
    for _ in range(2):
        close_broken_run(tmp_path, "it was ended from outside")
    data = read_run(tmp_path)
    assert data.closed
    assert [event.message for event in data.events] == [
        "the run ended early: it was ended from outside"
    ]
    assert (tmp_path / "report.html").exists()


def test_whatever_ends_the_process_another_one_closes_its_run(tmp_path):
    child = os.fork()
    if child == 0:
        with closed_afterwards(tmp_path):
            JsonlTracker(tmp_path).log(LeakageRecord("r", 1, 0, 0, "metric", "psnr", 20.0, "dB"))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 200
    while not (tmp_path / "report.html").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "report.html").exists()
    data = read_run(tmp_path)
    assert data.closed
    assert data.events[0].message == "the run ended early: it was not ended in order"


def test_a_run_that_ends_in_order_is_left_alone(tmp_path):
    JsonlTracker(tmp_path)
    with closed_afterwards(tmp_path):
        pass
    assert not read_run(tmp_path).closed


def test_a_full_disk_stops_the_record_and_not_the_training(tiny_data, monkeypatch):
    config, written, write = tiny_config(tiny_data), [], os.write

    def until_full(descriptor, content):
        if content.startswith((b"{", b"\n{")):
            written.append(content)
            if len(written) > 8:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", until_full)
    trained = []
    honest, app = make_client_app(lambda _: build(config)), ClientApp()

    @app.train()
    def train(message, context):
        trained.append(context.node_config["partition-id"])
        return honest(message, context)

    console = Console(record=True, quiet=False, width=200, file=io.StringIO())
    run_inline(make_server_app(lambda _: config, console), app, config["num_clients"])
    assert sorted(trained) == [0, 0, 1, 1, 2, 2]
    said = console.export_text()
    assert said.count("The training goes on, but JsonlTracker cannot record it: OSError") == 1
    assert "entries were lost" in said
    data = read_run(config["run_dir"])
    assert not data.closed
    assert not data.problems


def test_what_the_command_makes_is_its_owners_only(tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        monkeypatch.setattr(by_hydra, "run_by_hydra", lambda: (tmp_path / "run.log").touch())
        monkeypatch.setattr("sys.argv", ["run.py"])
        command.main()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.log").stat().st_mode) == 0o600
