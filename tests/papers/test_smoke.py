"""Every experiment of a paper runs at its smallest size, from its config to its page."""

import json

import pytest

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.config import compose
from flwr_leakage.simulation.paper import perform

EXPERIMENTS = sorted(
    path.stem
    for path in (conf_dir() / "experiment").glob("*.yaml")
    if "\npaper:" in path.read_text()
)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_and_is_judged(name, tmp_path):
    overrides = [f"experiment={name}", "size=smoke", f"lab.results={tmp_path / 'results'}"]
    config = compose([*overrides, f"lab.cache={tmp_path / 'cache'}"], str(tmp_path))
    page = perform(config, overrides)
    found = json.loads((page.parent / "findings.json").read_text())
    assert found["rows"] and found["claims"] and found["name"] == name
    assert list(page.parent.glob("*.png"))
    text = page.read_text()
    assert text.startswith(f"# {found['title']}\n") and f"+experiment={name} size=smoke" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_three_sizes(name, tmp_path):
    config = compose([f"experiment={name}"], str(tmp_path))
    assert sorted(config["sizes"]) == ["cpu", "paper", "smoke"]
    assert config["size"] == "cpu"
