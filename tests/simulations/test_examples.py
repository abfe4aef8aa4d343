"""The worked example runs as it is."""

import runpy
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flwr_leakage.flower import InlineGrid
from flwr_leakage.tracking import read_run
from simulations.examples.quickstart import client_app, server_app


def test_the_quickstart_is_explained_and_its_digits_recovered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    context = Context(1, 1, {}, RecordDict(), {"num-server-rounds": 1})
    server_app.app(InlineGrid(client_app.app, 2), context)
    data = read_run("leakage")
    assert [r.value for r in data.records if r.name == "replay_passed"] == [1.0, 1.0]
    found = [r.value for r in data.records if r.name == "psnr"]
    assert len(found) == 2
    assert min(found) > 40
    assert not [event for event in data.events if event.level != "info"]
    told = capsys.readouterr().out
    assert "Private images leak. 2 of the 2 attacked images can be seen" in told
    assert f"Report: {(tmp_path / 'leakage' / 'report.html').resolve()}" in told
    page = Path("leakage/report.html").read_text(encoding="utf-8")
    assert "here one flat image, in the mean colour" in page and "own test images" not in page


def test_a_second_run_says_in_one_sentence_that_the_folder_holds_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("leakage").mkdir()
    Path("leakage/records.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="folder must be a new one, got leakage, which holds a"):
        runpy.run_module("simulations.examples.quickstart", run_name="__main__")
