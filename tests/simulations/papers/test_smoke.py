"""Every experiment of a paper runs at its smallest size, from its config to its page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from flwr_leakage.simulation.config import ConfigError, to_config
from flwr_leakage.simulation.nodes import instantiate
from simulations.papers import lavp_study
from simulations.papers.configured import CONF, perform_config, sized
from simulations.papers.single_gradients import Inversion
from simulations.run import is_of_papers

ROOT = Path(__file__).parents[3]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
SHARING = {
    "alc_correlation": "alc_skip_width",
    "lavp_table1": "lavp_fusion",
    "i2f_bound": "i2f_perception",
}
"""The second reads the finished parts of the first; a test runs both in one cache."""


def composed(name, *overrides):
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose("config", [f"experiment={name}", *overrides])
    return to_config(cfg, {"experiment": name})


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n not in SHARING.values()])
def test_every_experiment_runs_and_is_judged(name, tmp_path, capsys):
    for one in [n for n in (name, SHARING.get(name)) if n]:
        overrides = ["size=smoke", f"lab.results={tmp_path / 'results'}"]
        config = composed(one, *overrides, f"lab.cache={tmp_path / 'cache'}")
        assert set(config["sizes"]) - {"thorough"} == {"cpu", "paper", "smoke"}
        page = perform_config(config, overrides)
        found = json.loads((page.parent / "findings.json").read_text())
        assert found["rows"] and found["claims"] and found["name"] == one
        assert list(page.parent.glob("*.png"))
        text = page.read_text()
        assert text.startswith(f"# {found['title']}\n")
        assert f"+experiment={one} size=smoke" in text and str(tmp_path) not in text
        if one in SHARING.values():
            assert "epoch" not in capsys.readouterr().out  # nothing is trained or attacked again
        capsys.readouterr()


def test_ours_is_asked_where_the_paper_s_attacks_end_at_grey(tmp_path, monkeypatch):
    weak = Inversion("L2", 2, 0.1)._attack()
    monkeypatch.setattr(lavp_study, "load_preset", lambda name: {"strongest": weak}[name])
    monkeypatch.setattr(lavp_study, "_is_blind", lambda rows, attack: True)  # digits are not grey
    more = ["+paper.ours_seconds=1.0", "+paper.block=4", f"lab.results={tmp_path / 'results'}"]
    config = composed("lavp_table1", "size=smoke", *more, f"lab.cache={tmp_path / 'cache'}")
    page = perform_config(config, ["size=smoke", *more])
    claims = json.loads((page.parent / "findings.json").read_text())["claims"]
    said = [claim["reason"] for claim in claims if "MSE of L2 attacks" in claim["text"]]
    assert said == ["L2 attacks do no better than grey on LeNet: left out: LeNet"] * 4
    assert {c["judgement"] for c in claims if c["reason"] in said} == {"not comparable"}
    parts = [json.loads(path.read_text()) for path in tmp_path.glob("cache/parts/*/*.json")]
    images = [len(part["rows"]) for part in parts if part["part"] == "LeNet: strongest attack"]
    assert sorted(images) == [2, 4]


def test_the_usual_size_is_that_of_two_cores():
    assert composed("huang_table3")["size"] == "cpu"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_thorough_is_cpu_with_more_of_some_settings(name):
    usual, thorough = (sized(composed(name, f"size={size}")) for size in ("cpu", "thorough"))
    assert instantiate({"paper": thorough}, "paper")
    more = composed(name)["sizes"].get("thorough", {})
    assert {k: v for k, v in thorough.items() if k not in more} == {
        k: v for k, v in usual.items() if k not in more
    }
    if "noise" in more:
        assert thorough["noise"] == {**usual["noise"], **more["noise"]}


def test_a_size_that_is_none_is_named():
    with pytest.raises(ConfigError, match=r"size must be one of .* got 'smok' \(did you mean"):
        sized(composed("huang_table3", "size=smok"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["experiment=i2f_pruning"], True),
        (["size=smoke", "+experiment=i2f_pruning"], True),
        (["-m", "experiment=i2f_pruning,i2f_bound"], True),
        (["-m", "experiment=glob(i2f_*)"], True),
        (["experiment=single_digit"], False),
        (["experiment=null", "model=lenet"], False),
        (["attack=idlg"], False),
    ],
)
def test_the_experiments_of_papers_are_told_from_audits(arguments, expected):
    assert is_of_papers(arguments) is expected


def run(folder, *arguments):
    command = [sys.executable, ROOT / "simulations/run.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_of_a_clone_runs_an_experiment(tmp_path):
    kept = ["lab.results=pages", "lab.cache=kept"]
    done = run(tmp_path, "+experiment=i2f_pruning", "size=smoke", *kept)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pages/i2f_pruning-smoke/i2f_pruning.md").is_file()


def test_a_mistyped_key_of_an_experiment_is_told_before_any_work(tmp_path):
    done = run(tmp_path, "experiment=i2f_cost", "siz=smoke")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no key 'siz' at the top level (did you mean")
    assert not any(tmp_path.iterdir())
