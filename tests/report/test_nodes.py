"""Clients that are known by their node's id have short names on every page."""

import xml.etree.ElementTree as ET

import pytest

from flwr_leakage.evidence import make_evidence
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import write_report
from flwr_leakage.report.nodes import with_short_names
from flwr_leakage.testing import check, junit
from flwr_leakage.tracking import JsonlTracker, read_run

FIRST, SECOND = 9876543210123456789, 4294967296


@pytest.fixture
def folder(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    for node in (FIRST, SECOND):
        why = f"like node {FIRST}, and as 12345678901 says"
        for name, note in (("images", ""), ("not_attacked", why)):
            tracker.log(LeakageRecord("run", 1, node, -1, "client", name, 4.0, note=note))
        message = f"client {node} was not attacked: {why}."
        tracker.event(RunEvent("run", 1, node, "warning", message))
    tracker.close()
    return tmp_path / "run"


def test_page_evidence_and_junit_number_clients_as_they_were_first_seen(folder):
    page = write_report(folder).read_text()
    which = f"client 1 is node {FIRST}, client 2 is node {SECOND}."
    assert which in page and page.count(str(FIRST)) == page.count(str(SECOND)) == 1
    texts = [each.text for each in make_evidence(folder).statements]
    assert sum(which in text for text in texts) == 1
    assert str(FIRST) not in " ".join(texts).replace(which, "")
    names = [case.get("name") for case in ET.fromstring(junit(check(folder)))]
    assert names == ["the run as a whole", "client 1, round 1", "client 2, round 1"]


def test_texts_say_the_same_numbers_and_records_keep_the_ids(folder):
    run = read_run(folder)
    shown = with_short_names(run)
    assert {record.client_id for record in run.records} == {FIRST, SECOND}
    assert shown.records[1].note == "like client 1, and as 12345678901 says"
    assert shown.events[1].message.startswith("client 2 was not attacked: like client 1,")


def test_numbers_begin_after_the_partitions_that_others_told(folder):
    tracker = JsonlTracker(folder, resume=True)
    tracker.log(LeakageRecord("run", 1, 3, -1, "client", "images", 4.0))
    tracker.close()
    shown = with_short_names(read_run(folder))
    assert {record.client_id for record in shown.records} == {3, 4, 5}


def test_a_run_whose_clients_told_their_partitions_stays_as_it_is(run_folder):
    run = read_run(run_folder)
    assert with_short_names(run) is run
