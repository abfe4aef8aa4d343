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
SHARING = {
    "alc_correlation": "alc_skip_width",
    "lavp_table1": "lavp_fusion",
    "i2f_bound": "i2f_perception",
}
"""The second reads the finished parts of the first; a test runs both in one cache."""


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n not in SHARING.values()])
def test_every_experiment_runs_and_is_judged(name, tmp_path, capsys):
    for one in [n for n in (name, SHARING.get(name)) if n]:
        overrides = [f"experiment={one}", "size=smoke", f"lab.results={tmp_path / 'results'}"]
        config = compose([*overrides, f"lab.cache={tmp_path / 'cache'}"], str(tmp_path))
        assert sorted(config["sizes"]) == ["cpu", "paper", "smoke"]
        page = perform(config, overrides)
        found = json.loads((page.parent / "findings.json").read_text())
        assert found["rows"] and found["claims"] and found["name"] == one
        assert list(page.parent.glob("*.png"))
        text = page.read_text()
        assert text.startswith(f"# {found['title']}\n")
        assert f"+experiment={one} size=smoke" in text and str(tmp_path) not in text
        if one in SHARING.values():
            assert "epoch" not in capsys.readouterr().out  # nothing is trained or attacked again
        capsys.readouterr()


def test_the_usual_size_is_that_of_two_cores(tmp_path):
    assert compose(["experiment=huang_table3"], str(tmp_path))["size"] == "cpu"
