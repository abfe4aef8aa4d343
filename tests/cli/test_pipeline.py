"""A run as a check: it passes, leaks, or cannot say, and never passes in silence."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from told import blind, metric, objective, spared
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.records import LeakageRecord
from flwr_leakage.testing import EXIT_CODES, assert_no_leak, check, junit, markdown, sarif
from flwr_leakage.tracking import JsonlTracker, read_run, write_metadata

LIMITED = {"server": {"attack_max_seconds": 4.0}}


def attacked(psnr, client=0, cut_off=False):
    made = [metric(1, client, 0, psnr), blind(1, client, 0), objective(1, client, 0.1)]
    if cut_off:
        made.append(LeakageRecord("r", 1, client, -1, "attack", "stopped_by_budget", 1.0))
    return made


def identified(sample):
    rank = metric(1, 0, sample, 1.0, "identification_rank", "of 101 images")
    return [metric(1, 0, sample, 11.0), blind(1, 0, sample), objective(1, 0, 0.1), rank]


RUNS = {
    "leak": attacked(60.0),
    "partly": attacked(14.0),
    "nothing": attacked(11.0),
    "no attack": [spared(1, 0, 3, "no attack is configured")],
    "no record": [],
    "all cut off": [*attacked(11.0, cut_off=True), *attacked(14.0, 1, cut_off=True)],
    "one cut off": [*attacked(11.0), *attacked(11.0, 1, cut_off=True), spared(1, 2, 9, "too many")],
    "refused": [objective(1, 0, None, "no layer")],
    "identified": [each for sample in range(3) for each in identified(sample)],
}
OUTCOMES = {  # by the worst grade that is allowed
    ("leak", "nothing"): "leaked", ("leak", "partly"): "leaked",
    ("leak", "recognisable"): "leaked",
    ("partly", "nothing"): "leaked", ("partly", "partly"): "passed",
    ("nothing", "nothing"): "passed",
    ("no attack", "partly"): "untested", ("no record", "nothing"): "untested",
    ("all cut off", "partly"): "unsure", ("all cut off", "nothing"): "leaked",
    ("one cut off", "nothing"): "passed",
    ("refused", "partly"): "unsure",
    ("identified", "nothing"): "leaked", ("identified", "partly"): "passed",
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    def write(name, close=True, records=None):
        tracker = JsonlTracker(tmp_path / "run")
        write_metadata(tmp_path / "run", LIMITED, 0, {"run": f"{name} <b>|`$(x)`"})
        for record in RUNS[name] if records is None else records:
            tracker.log(record)
        if close:
            tracker.close()
        return tmp_path / "run"

    return write


@pytest.mark.parametrize(("run", "outcome"), OUTCOMES.items(), ids=map("-".join, OUTCOMES))
def test_a_run_has_one_outcome_in_every_file(folder_of, run, outcome):
    name, above = run
    folder = folder_of(name)
    found = check(folder, above)
    assert found.outcome == outcome and found.exit_code == EXIT_CODES[outcome]
    suite = ET.fromstring(junit(found))
    cases = suite.findall("testcase")
    assert suite.get("tests") == str(len(cases)) == str(1 + len(found.updates))
    for plural, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(plural) == str(len(suite.findall(f"testcase/{tag}")))
    red = suite.get("failures") != "0" or suite.get("errors") != "0"
    assert red == (outcome != "passed")
    [driven] = json.loads(sarif(found))["runs"]
    levels = [result["level"] for result in driven["results"]]
    assert ("error" in levels) == (outcome != "passed")
    rules = {rule["id"] for rule in driven["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in driven["results"]} <= rules
    text = markdown(found)
    assert text.startswith("## ✅" if outcome == "passed" else ("## ❌", "## ⚠️"))
    assert "<b>" not in text and "|\\`" in text.replace("\\|", "|")
    if outcome == "passed":
        assert_no_leak(folder, above=above)
    else:
        with pytest.raises(AssertionError) as caught:
            assert_no_leak(read_run(folder), above=above)
        assert str(caught.value).startswith(found.message)


def test_what_cannot_be_judged_is_named_though_the_run_passes(folder_of):
    found = check(folder_of("one cut off"), "nothing")
    assert "2 updates of 3 cannot be judged (the time limit" in found.message
    assert [each.outcome for each in found.updates] == ["passed", "unsure", "untested"]
    skipped = ET.fromstring(junit(found)).findall("testcase/skipped")
    told = [each.get("message") for each in skipped]
    assert "the time limit of 4 CPU seconds ended the attack" in told[0]
    assert told[1] == "Not attacked: too many."


def test_an_update_that_no_reason_spared_is_named_all_the_same(folder_of):
    records = [replace(r, note="") if r.name == "not_attacked" else r for r in RUNS["one cut off"]]
    found = check(folder_of("one cut off", records=records), "nothing")
    assert found.outcome == "passed" and "no reason was recorded)" in found.message


def test_an_unfinished_run_does_not_pass(folder_of):
    found = check(folder_of("nothing", close=False))
    assert found.outcome == "unsure" and "Unfinished run." in found.message


def test_texts_of_a_run_break_no_file(folder_of):
    odd = spared(1, 0, 3, "a\x00b\ufffe\x1b[2J ]]> <x> & | `x`")
    found = check(folder_of("nothing", records=[*attacked(11.0, 1), odd]))
    message = ET.fromstring(junit(found)).find("testcase/skipped").get("message")
    assert "<x> &" in message and "\x1b" not in message
    assert json.loads(sarif(found))["version"] == "2.1.0"


def test_the_command_ends_with_the_outcome_and_writes_the_files(folder_of, tmp_path):
    def call(*arguments):
        result = CliRunner().invoke(app, ["check", *map(str, arguments)])
        return result.exit_code, result.output

    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    files = ("--junit", tmp_path / "x.xml", "--sarif", tmp_path / "x.sarif", "--summary", summary)
    code, said = call(folder_of("leak"), "--fail-above", "partly", *files)
    assert code == 3 and said.startswith("leaked: Not as it is")
    assert ET.parse(tmp_path / "x.xml").getroot().get("failures") == "2"
    assert json.loads((tmp_path / "x.sarif").read_text())["runs"][0]["results"]
    assert summary.read_text().startswith("before\n## ❌")
    assert call(tmp_path / "nowhere")[0] == 2
    code, said = call(tmp_path / "run", "--fail-above", "exact")
    assert code == 2 and "must be one of ['recognisable', 'partly', 'nothing']" in said


def test_a_simulation_is_checked_when_it_ends(tmp_path, monkeypatch):
    def simulate(arguments):
        *_, folder = [each.partition("=")[2] for each in arguments if each.startswith("run_dir=")]
        tracker = JsonlTracker(folder)
        for record in RUNS["leak"]:
            tracker.log(record)
        tracker.close()

    def call(*arguments):
        result = CliRunner().invoke(app, ["run", *arguments])
        return result.exit_code, result.output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flwr_leakage.cli.app._simulate", simulate)
    code, said = call("seed=1", "--fail-above", "recognisable", "run_dir=a")
    assert code == 3 and "leaked: Not as it is" in said
    assert call("run_dir=b", "--junit", "b.xml")[0] == 3 and (tmp_path / "b.xml").is_file()
    assert call("-m", "--fail-above", "partly")[0] == 2
    assert call("--fail-above", "party", "run_dir=c")[0] == 2 and not (tmp_path / "c").exists()
