"""The example keeps to the strict format of apps on Flower Hub."""

import zipfile
from pathlib import Path

from flwr.cli.build import build_fab_from_disk

EXAMPLES = Path(__file__).parents[2] / "simulations" / "examples"


def test_the_quickstart_builds_with_its_license(tmp_path):
    bundle = tmp_path / "app.fab"
    bundle.write_bytes(build_fab_from_disk(EXAMPLES))
    with zipfile.ZipFile(bundle) as held:
        names = set(held.namelist())
        told = held.read("pyproject.toml").decode()
    assert {"LICENSE", "quickstart/client_app.py", "quickstart/server_app.py"} <= names
    assert "fab-format-version = 1" in told and "flwr-version-target" in told
