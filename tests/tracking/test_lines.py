"""The format of records: its schema, its versions, and its page."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import records_page
import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import render_report
from flwr_leakage.tracking import JsonlTracker, TextRecord, read_run, schema, write_metadata
from flwr_leakage.tracking.lines import LINES, MIGRATIONS, VERSION, NewerVersionError

DOCS = Path(__file__).parents[2] / "docs"
RUNS = Path(__file__).parent / "runs"


def written(folder):
    tracker = JsonlTracker(folder)
    tracker.log(LeakageRecord("r", 1, 0, 0, "metric", "psnr", 20, "dB"))
    tracker.log(LeakageRecord("r", 1, 0, 0, "score", "s", None, error=None, state="unresolved"))
    tracker.event(RunEvent("r", 1, 0, "info", "said"))
    tracker.image(1, 0, 0, "original", torch.zeros(1, 2, 2))
    tracker.text(TextRecord(1, 0, 0, "original", 2, (3, 4), ("a", "b")))
    tracker.close()
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_every_line_that_is_written_fits_the_schema_and_no_other_does(tmp_path):
    rows = written(tmp_path / "run")
    assert {row["type"] for row in rows} == set(LINES)
    check = jsonschema.Draft202012Validator(schema())
    check.check_schema(schema())
    assert [list(check.iter_errors(row)) for row in rows] == [[]] * len(rows)
    for row in rows:
        for name in row.keys() - {"type"}:
            assert not check.is_valid({**row, name: {"of": "another type"}})
            assert not check.is_valid({key: row[key] for key in row if key != name})


def test_a_field_of_another_type_is_left_out_by_the_reader_too(tmp_path):
    rows = written(tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    for place, row in enumerate(rows):
        for name in row.keys() - {"path", "time"}:
            changed = [*rows[:place], {**row, name: {"of": "another type"}}, *rows[place + 1 :]]
            path.write_text("".join(json.dumps(each) + "\n" for each in changed))
            with pytest.warns(UserWarning, match=f"line {place + 1} of records.jsonl"):
                assert len(read_run(tmp_path / "run").problems) == 1


def test_there_is_a_way_from_every_version_to_this_one():
    assert list(MIGRATIONS) == list(range(1, VERSION))
    assert {each.name for each in RUNS.iterdir()} == {f"version_{v}" for v in MIGRATIONS}


def test_a_run_of_version_1_opens_and_has_its_report(tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(RUNS / "version_1", folder)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert not any("version" in row or "state" in row for row in rows)
    png = written(tmp_path / "new") and next((tmp_path / "new" / "images").iterdir()).read_bytes()
    for row in rows:
        if row["type"] == "image":
            (folder / row["path"]).parent.mkdir(exist_ok=True)
            (folder / row["path"]).write_bytes(png)
    run = read_run(folder)
    assert (len(run.records), len(run.images), run.closed, run.problems) == (50, 8, True, ())
    assert {record.state for record in run.records} == {""}
    page = render_report(run)
    assert "120.0 dB" in page and "May training go on?" in page


@pytest.mark.parametrize("place", ["records.jsonl", "run.json"])
def test_a_newer_version_is_refused_in_a_sentence(tmp_path, place):
    folder = tmp_path / "run"
    written(folder)
    write_metadata(folder, {}, 0)
    text = (folder / place).read_text()
    (folder / place).write_text(text.replace(f'"version": {VERSION}', f'"version": {VERSION + 7}'))
    told = f"records of version {VERSION + 7}, and this flwr-leakage reads versions up to {VERSION}"
    with pytest.raises(NewerVersionError, match=told):
        read_run(folder)


@pytest.mark.parametrize("version", [0, -1, "2", None, 2.0, True])
def test_a_version_that_is_none_is_a_line_that_cannot_be_read(tmp_path, version):
    rows = written(tmp_path / "run")
    rows[1]["version"] = version
    path = tmp_path / "run" / "records.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.warns(UserWarning, match="line 2 of records.jsonl"):
        assert len(read_run(tmp_path / "run").records) == 1


def test_the_page_tells_what_the_types_say():
    assert (DOCS / "records.md").read_text() == records_page.page()
