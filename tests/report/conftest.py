import pytest
from report_page import fill

from flwr_leakage.tracking import JsonlTracker, write_metadata


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    tracker = JsonlTracker(folder)
    config = {"num_rounds": 2, "model": {"_target_": "x.LeNet", "width": 1}}
    write_metadata(folder, config, 5, {"run": "demo", "threat": "labels known, single view"})
    fill(tracker)
    tracker.close()
    return folder
