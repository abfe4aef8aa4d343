"""The command: every subcommand runs, and errors are sentences with an exit code."""

import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.cli.catalog import entries, groups
from flwr_leakage.cli.doctor import _lpips
from flwr_leakage.cli.price import dry_run
from flwr_leakage.records import LeakageRecord
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.tracking import JsonlTracker

runner = CliRunner()


@pytest.fixture
def run_folder(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.log(LeakageRecord("run", 1, 0, 0, "metric", "psnr", 30.0, "dB", "larger leaks more"))
    tracker.close()
    return tmp_path / "run"


def call(*arguments, code=0):
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_every_command_has_help():
    listed = call("--help")
    for command in ("run", "attack", "score", "report", "compare", "export", "list", "doctor"):
        assert command in listed
        assert "Usage" in call(command, "--help")
    assert "A run folder." in call("report", "--help")  # of an argument
    assert "flwr-leakage 0" in call("--version")


@pytest.mark.parametrize("arguments", [["num_clietns=2"], ["num_rounds=0"], ["attack=strongst"]])
@pytest.mark.parametrize("command", [["run"], ["run", "--dry-run"]])
def test_one_mistake_has_one_exit_code(tmp_path, monkeypatch, command, arguments):
    monkeypatch.chdir(tmp_path)
    assert "error: " in call(*command, *arguments, code=2)


@pytest.mark.parametrize("group", groups())
def test_every_option_says_what_it_is(group):
    assert [name for name, line in entries(group).items() if not line] == []


def test_list_names_the_options_of_a_group():
    assert "strongest" in call("list", "attack")
    assert "group must be one of" in call("list", "atack", code=2)


def test_report_compare_and_export_of_a_run(run_folder, tmp_path):
    assert "report.html" in call("report", run_folder)
    assert "| 1 | 1 | 30.0 |" in call("compare", run_folder, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()
    call("export", run_folder, "--records", "-o", tmp_path / "records.csv")
    assert "psnr" in (tmp_path / "records.csv").read_text()


def test_errors_are_sentences(tmp_path):
    assert "at least one run" in call("compare", tmp_path, code=2)
    assert "expected a run folder" in call("report", tmp_path / "none", code=2)


def test_the_report_of_a_sweep_points_to_compare(run_folder):
    said = call("report", run_folder.parent, code=2)
    assert "which holds 1; put them" in said and f"compare {run_folder.parent}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seed=0,1"], "add --multirun"),
        (["attack=glob(i*)"], "as in attack=A,B, got 'attack=glob(i*)'"),
        (["attack=glob(nothing*)"], "no attack is meant by 'attack=glob(nothing*)'"),
        (["seed=0", "hydra.sweeper.params.seed=0"], "no settings of Hydra's own"),
        (["seed=${nothing}"], "'nothing' not found"),
    ],
)
def test_what_a_dry_run_cannot_read_is_a_sentence(arguments, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        dry_run(arguments, "," not in arguments[0], Console())


def test_doctor_finds_what_the_tests_run_with():
    assert "torch" in call("doctor")


def test_doctor_tells_the_state_of_the_backbone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert "FLWR_LEAKAGE_OFFLINE is set:" in _lpips().text
    monkeypatch.delenv("FLWR_LEAKAGE_OFFLINE")
    assert "the first run that attacks fetches its 5 MB" in _lpips().text
    file = tmp_path / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cut")
    assert _lpips().text == f"damaged, delete it: {file}"


def test_the_name_of_a_score_may_be_left_out_before_an_override(monkeypatch):
    posed = []

    def simulate(chosen):
        posed.extend(chosen)
        raise SystemExit(0)

    monkeypatch.setattr("flwr_leakage.cli.app._simulate", simulate)
    CliRunner().invoke(app, ["score", "client.num_examples=2", "seed=3"])
    assert {"score=default", "client.num_examples=2", "seed=3"} <= set(posed)
