"""A page of evidence: each sentence has its records, and a changed one is noticed."""

import json
import re
from dataclasses import asdict

import pytest
from report_page import Page
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.evidence import (
    make_evidence,
    record_id,
    records_by_id,
    verify,
    write_evidence,
)
from flwr_leakage.records import LeakageRecord
from flwr_leakage.tracking import JsonlTracker, read_run, write_metadata
from flwr_leakage.tracking.jsonl import METADATA_FILE, RECORDS_FILE


def changed(folder, before, after):
    path = folder / RECORDS_FILE
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_each_sentence_has_its_records_and_each_record_its_id(run_folder):
    made = make_evidence(run_folder)
    assert made == make_evidence(run_folder)
    assert [each.id for each in made.statements] == [
        f"S{i + 1}" for i in range(len(made.statements))
    ]
    by_id = {record_id(record): record for record in read_run(run_folder).records}
    parts = {each.part for each in made.statements}
    assert {"Verdict", "Images", "Labels", "Membership", "What was not tested"} <= parts
    for each in made.statements:
        assert set(each.records) <= by_id.keys()
        assert bool(each.records) == (each.source == "records")
        assert bool(each.digest) == (each.source != "method")
    [images] = [each for each in made.statements if each.text.startswith("Private images leak")]
    assert {by_id[one].kind for one in images.records} == {"metric"}
    one = images.records[0]
    assert records_by_id(run_folder, [one]) == [by_id[one]]
    with pytest.raises(ValueError, match="has none of"):
        records_by_id(run_folder, ["3fa2c4d1b0e9"])


def test_an_app_of_ones_own_tells_what_the_attacker_was_given(run_folder):
    (run_folder / METADATA_FILE).unlink()
    [told] = [e for e in make_evidence(run_folder).statements if e.part == "What the attacker knew"]
    notes = {r.note for r in read_run(run_folder).records if r.name == "objective"}
    expected = {note.partition(";")[0] for note in notes} - {""}
    assert expected and told.source == "records" and told.records
    assert all(words in told.text for words in expected)


@pytest.mark.parametrize(
    "source", ["EDPB Opinion 28/2024", "article 35 GDPR", "NIST AI 100-2", "OWASP AISVS"]
)
def test_each_map_is_a_sentence_of_its_own_and_rests_on_no_record(run_folder, source):
    [told] = [each for each in make_evidence(run_folder).statements if source in each.text]
    assert (told.part, told.source, told.records) == ("As information", "method", ())


def test_the_page_holds_the_sentences_and_its_data(run_folder, tmp_path):
    path = write_evidence(run_folder, tmp_path / "filed.html")
    made = make_evidence(run_folder)
    assert json.loads((tmp_path / "filed.json").read_text()) == json.loads(json.dumps(asdict(made)))
    html = path.read_text()
    text = Page(re.sub(r"<script.*</script>", "", html, flags=re.DOTALL)).text
    for each in made.statements:
        assert " ".join(each.text.split()) in text and f'id="{each.id}"' in html
    assert "<img" not in html and "data:" not in html.replace("on the data", "")
    assert path.stat().st_mode & 0o777 == 0o600
    for file in (path, tmp_path / "filed.json"):
        assert verify(file, run_folder) == ()


def test_a_changed_record_a_new_one_and_a_changed_page_are_noticed(run_folder, tmp_path):
    path = write_evidence(run_folder, tmp_path / "filed.html")
    html = path.read_text()
    path.write_text(html.replace("Private images leak.", "No private image leaks.", 1))
    assert any("reads otherwise on the page" in told for told in verify(path, run_folder))
    path.write_text(html)
    changed(run_folder, '"value": 31.0', '"value": 30.9')
    told = verify(path, run_folder)
    assert told[0] == f"{RECORDS_FILE} was changed."
    assert any(re.fullmatch(r"S\d+ rests on other records now: 2 differ.", each) for each in told)
    changed(run_folder, '"value": 30.9', '"value": 31.0')
    assert verify(path, run_folder) == ()
    (run_folder / "images" / next(iter(sorted((run_folder / "images").iterdir()))).name).unlink()
    assert verify(path, run_folder) == ("images was changed.",)


def test_foreign_texts_stay_texts_and_another_file_is_refused(tmp_path):
    payload = "</script><script>alert(1)</script><b>"
    tracker = JsonlTracker(tmp_path / "run")
    write_metadata(tmp_path / "run", {}, 0, {"run": payload, "threat": payload})
    tracker.log(LeakageRecord("r", 1, 0, -1, "client", "not_attacked", 3.0, note=payload))
    tracker.close()
    path = write_evidence(tmp_path / "run")
    assert path.read_text().count("<script") == 1 and "<b>" not in path.read_text()
    assert verify(path, tmp_path / "run") == ()
    for content in ("{}", "[1]", "<html>", '{"files": {}, "version": "", "statements": [3]}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="expected a page of evidence"):
            verify(path, tmp_path / "run")


def test_the_commands_write_find_and_verify(run_folder, tmp_path):
    def call(*arguments):
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        return result.exit_code, result.output

    page = tmp_path / "filed.html"
    assert call("evidence", run_folder, "-o", page) == (0, f"{page}\n")
    one = record_id(read_run(run_folder).records[0])
    code, said = call("verify", page, run_folder, "--find", one)
    assert code == 0 and "LeakageRecord(" in said and "bears out the page" in said
    changed(run_folder, '"value": 31.0', '"value": 30.9')
    code, said = call("verify", page, run_folder)
    assert code == 1 and "records.jsonl was changed." in said
    assert call("verify", tmp_path / "none.html", run_folder)[0] == 2
