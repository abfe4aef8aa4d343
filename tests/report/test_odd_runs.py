"""Pages of runs with foreign texts, absurd numbers, or very much of everything."""

import json
from dataclasses import asdict, replace

import pytest
from report_page import fill, report

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking import JsonlTracker, write_metadata

PAYLOAD = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}$x^$</style>\ud800'


def test_foreign_text_stays_text(tmp_path):
    tracker = JsonlTracker(tmp_path)
    extra = dict.fromkeys(("run", "threat", "attack", "defense", "dataset"), PAYLOAD)
    config = {PAYLOAD: PAYLOAD, "model": {"_target_": PAYLOAD, PAYLOAD: PAYLOAD}}
    write_metadata(tmp_path, config, 0, extra)
    fill(tracker, run=PAYLOAD, name=PAYLOAD, note=PAYLOAD, message=PAYLOAD)
    tracker.log(LeakageRecord(PAYLOAD, 1, 0, 0, "metric", PAYLOAD, 1.0, PAYLOAD, "", PAYLOAD))
    tracker.log(LeakageRecord(PAYLOAD, 1, -1, -1, "utility", PAYLOAD, 1.0, PAYLOAD))
    tracker.log(LeakageRecord(PAYLOAD, 1, -1, -1, "cost", PAYLOAD, 1.0, PAYLOAD))
    tracker.log(LeakageRecord(PAYLOAD, 1, -1, -1, "attack", PAYLOAD, 1.0, PAYLOAD))
    tracker.close()
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"type": "<script>alert(3)</script>"}\n')
    with pytest.warns(UserWarning, match="line"):
        html, page = report(tmp_path)
    assert page.all("script") == [{}] and "alert" not in html.split("<script>")[1]
    assert all("onerror" not in attrs for _, attrs in page.tags)
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert "{{ 7*7 }}" in page.text and "alert(3)" in page.text
    assert html.count("</style>") == 1


def test_long_tables_are_folded(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for server_round in range(1, 41):
        tracker.log(LeakageRecord("r", server_round, -1, -1, "utility", "test_accuracy", 0.5))
    tracker.close()
    _, page = report(tmp_path)
    assert "All 40 rows" in page.text
    assert len(page.all("tr")) == (1 + 12) + (1 + 40)


def test_many_clients_stay_readable(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for client in range(400):
        tracker.log(LeakageRecord("r", 1, client, 0, "metric", "psnr", 10 + client / 50, "dB"))
        tracker.log(LeakageRecord("r", 1, client, 0, "score", "s", client / 50, "1"))
        tracker.event(RunEvent("r", 1, client, "warning", "slow"))
    tracker.close()
    html, page = report(tmp_path)
    assert "300 further clients left out." in page.text
    assert "200 further events left out" in page.text
    assert "Dots: 200 of up to 400 values a round, even by rank." in page.text
    assert len(html) < 1_000_000


def test_scores_that_are_one_number_throughout_get_a_sentence_and_no_chart(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i in range(6):
        tracker.log(LeakageRecord("r", 1, i, 0, "metric", "psnr", 10.0 + i, "dB"))
        for name, value in (("a", 0.0), ("b", 0.0), ("c", 2.0), ("d", float(i))):
            tracker.log(LeakageRecord("r", 1, i, 0, "score", name, value, "1"))
    tracker.close()
    _, page = report(tmp_path)
    assert "a, b: 0 for every sample, hence with neither chart nor column." in page.text
    assert "c: 2.00 for every sample" in page.text
    assert len(page.all("svg")) == 5  # the map, PSNR wide and narrow, d by round, d against PSNR


def test_a_chart_that_leaves_out_dots_says_so(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i in range(1600):
        tracker.log(LeakageRecord("r", 1, i, 0, "metric", "psnr", 10 + i / 50, "dB"))
        tracker.log(LeakageRecord("r", 1, i, 0, "score", "s", i / 50, "1"))
    tracker.close()
    assert "Only some of the 1,600 dots are drawn." in report(tmp_path)[1].text


def _with_line(folder, line):
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_one_absurd_score_is_left_out_and_told(run_folder):
    """From a client's note, and from a file that was written by something else."""
    record = LeakageRecord("demo", 1, 0, 0, "score", "lambda_max", 1.7e308, "1", "larger is safer")
    tracker = JsonlTracker(run_folder, resume=True)
    tracker.log(record)
    tracker.log(replace(record, client_id=1, value=1e100))
    tracker.close()
    _with_line(run_folder, {"type": "record", **asdict(replace(record, client_id=2))})
    with pytest.warns(UserWarning, match=r"must lie in ±1e\+100, got 1.7e\+308"):
        html, page = report(run_folder)
    assert "value is 1.7e+308" in page.text
    assert "inf" not in html.replace("info", "").replace("inferred", "").lower().split()


def test_huge_and_deceiving_texts_stay_small_and_visible(run_folder):
    before = len(report(run_folder)[0])
    tracker = JsonlTracker(run_folder, resume=True)
    tracker.event(RunEvent("demo", 1, 0, "error", "a" * 9_000_000))
    tracker.event(RunEvent("demo", 1, 0, "error", chr(27) + "[2J" + chr(0x202E) + "evil"))
    tracker.close()
    event = RunEvent("demo", 1, 0, "error", "b" * 9_000_000)
    _with_line(run_folder, {"type": "event", **asdict(event)})
    html, page = report(run_folder)
    assert len(html) < before + 20_000
    assert "cut from 9,000,000 characters" in page.text
    assert "\\u001b[2J\\u202eevil" in page.text
