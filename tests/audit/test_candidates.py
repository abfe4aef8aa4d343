"""Candidates of a server's audit: what is recorded of them, and what the report tells."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flwr_leakage.audit import Candidates, ServerAudit, Truth
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from flwr_leakage.report.index import Index
from flwr_leakage.report.membership import membership_section
from flwr_leakage.report.verdict import judge
from flwr_leakage.tracking import JsonlTracker, read_run

SPEC = InputSpec((1, 6, 6), 5)
SCHEDULE = LocalSchedule(0.1, num_steps=1, batch_size=3)


def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 6, 6, generator=generator)
    return Batch(inputs, torch.randint(5, (count,), generator=generator))


def observed(gradient_map, client, server_round=1, frozen=False):
    params = gradient_map.params
    delta = local_update(gradient_map, params, data(client, 3), SCHEDULE)
    if frozen:
        delta = {k: torch.zeros_like(v) for k, v in delta.items()}
    update = Update(delta, {}, SCHEDULE, 3)
    return Observation(server_round, client, params, {}, update)


@pytest.fixture
def gradient_map():
    torch.manual_seed(0)
    return GradientMap(nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 5)))


def truth(server_round, client, count):
    return Truth(data(client, 3), data(client, 3))


def audited(folder, gradient_map, observations, **settings):
    held = [data(client, 3)[:1] for client in (0, 1)]
    records = Batch(
        torch.cat([*(b.inputs for b in held), data(77, 2).inputs]),
        torch.cat([*(b.targets for b in held), data(77, 2).targets]),
    )
    candidates = Candidates(records, data(99, 300), "test images")
    tracker = JsonlTracker(folder)
    settings = {"candidates": candidates, "truth": truth, **settings}
    audit = ServerAudit(gradient_map, SPEC, SCHEDULE, tracker, **settings)
    audit.inspect(1, observations, [])
    tracker.close()
    return read_run(folder)


def test_each_candidate_is_recorded_by_round_and_client_with_the_truth(tmp_path, gradient_map):
    run = audited(tmp_path / "run", gradient_map, [observed(gradient_map, c) for c in (0, 1)])
    found = {
        (r.client_id, r.sample): r.value
        for r in run.records
        if r.name == "membership_corrected" and r.value is not None
    }
    members = {key for key, value in found.items() if value < 0.01}
    assert len(found) == 8 and members == {(0, 0), (1, 1)}
    truth = {
        (r.client_id, r.sample) for r in run.records if r.name == "membership_truth" and r.value
    }
    assert truth == members
    (first, *_) = [r for r in run.records if r.name == "membership_evidence"]
    assert first.value == 2 and "300 null records (described as “test images”)" in first.note


def test_candidates_are_written_nowhere(tmp_path, gradient_map):
    audited(tmp_path / "run", gradient_map, [observed(gradient_map, 0)])
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert [p.name for p in files] == ["records.jsonl"]
    assert all(p.stat().st_mode & 0o077 == 0 for p in files)


def test_a_mean_is_tested_as_a_whole(tmp_path, gradient_map):
    observations = [observed(gradient_map, c) for c in (0, 1)]
    run = audited(
        tmp_path / "run", gradient_map, observations, threat=ThreatModel(view="aggregate")
    )
    rows = {(r.client_id, r.sample): r.value for r in run.records if r.name == "membership_exact"}
    assert rows == {(-1, 0): 1.0, (-1, 1): 1.0}


def test_an_update_that_tells_nothing_is_a_warning(tmp_path, gradient_map):
    run = audited(tmp_path / "run", gradient_map, [observed(gradient_map, 0, frozen=True)])
    (event,) = run.events
    assert event.message.startswith("candidates were not tested for client 0: the update is zero")
    assert membership_section(Index(run.records)) is None


def test_a_client_cannot_make_the_server_work_by_its_word(tmp_path, gradient_map):
    seen = observed(gradient_map, 0)
    many = replace(seen.update, num_examples=10**12, schedule=LocalSchedule(0.1, 10**6, 10**6))
    long = replace(seen.update, schedule=LocalSchedule(0.1, 10**9, 3))
    run = audited(tmp_path / "run", gradient_map, [replace(seen, update=many)], truth=None)
    assert "its steps use 1,000,000,000,000 samples, more than 10,000" in run.events[0].message
    run = audited(tmp_path / "long", gradient_map, [replace(seen, update=long)], truth=None)
    (told,) = [r.note for r in run.records if r.name == "membership_evidence"]
    assert "1000000000 local steps are more than the 1000 of a rehearsal" in told


def test_tests_of_a_round_end_with_its_seconds(tmp_path, gradient_map):
    observations = [observed(gradient_map, c) for c in (0, 1)]
    run = audited(tmp_path / "run", gradient_map, observations, max_round_seconds=1e-9)
    assert "CPU seconds of tests were spent" in run.events[0].message


def test_the_report_tells_who_was_found_and_whether_that_was_right(tmp_path, gradient_map):
    run = audited(tmp_path / "run", gradient_map, [observed(gradient_map, c) for c in (0, 1)])
    section = membership_section(Index(run.records))
    assert section.sentences[0] == (
        "The server tested 4 records in 2 updates: of clients 0 and 1 in round 1. The test is "
        "apart from the attack on images, and also takes updates that were not attacked. It "
        "found 2 used, 2 by algebra."
    )
    assert section.sentences[-1] == (
        "In this simulation the truth is known: 2 of 2 used records were found, and 0 of 2 records "
        "that no tested update held."
    )
    rows = {row[0]: row for row in section.table.rows}
    assert rows["0"][1::2] == ("it or an equal copy was used, by algebra", "client 0 of round 1")
    assert rows["2"][1] == "not found; may have been used" and rows["2"][3:] == ("–", "no")


def test_the_verdict_tells_what_was_found(tmp_path, gradient_map):
    run = audited(tmp_path / "run", gradient_map, [observed(gradient_map, c) for c in (0, 1)])
    told = (
        "Of 4 records that the server tested, it found 2 used, 2 by algebra: see “Was this record "
        "used?”."
    )
    assert told in judge(Index(run.records), run.events).details


@pytest.mark.parametrize(("null", "verdict"), [(160, "cannot be told"), (600, "it or a near copy")])
def test_a_record_below_too_few_null_records_is_not_said_to_be_absent(
    tmp_path, gradient_map, null, verdict
):
    torch.manual_seed(0)
    seen = observed(gradient_map, 0)
    delta = {k: v + 1e-5 * torch.randn_like(v) for k, v in seen.update.delta.items()}
    noised = replace(seen, update=replace(seen.update, delta=delta))
    records = Batch(
        torch.cat([data(0, 3).inputs, data(77, 9).inputs]),
        torch.cat([data(0, 3).targets, data(77, 9).targets]),
    )
    run = audited(
        tmp_path / "run", gradient_map, [noised], candidates=Candidates(records, data(99, null))
    )
    section = membership_section(Index(run.records))
    rows = {row[0]: row[1] for row in section.table.rows}
    assert all(rows[str(sample)].startswith(verdict) for sample in range(3))
    assert rows["5"] == "not found; may have been used"
    assert any("false alarm in 100 records found 100 %" in each for each in section.sentences)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (torch.zeros(3, 4), r"texts of token ids, got \(3, 4\) of torch.float32"),
        (torch.zeros(3, 4, 4), r"images \(N, C, H, W\) or texts \(N, T\), got Tensor"),
        (torch.zeros(0, 1, 2, 2), "at least one record, got none"),
    ],
)
def test_candidates_that_are_none_are_refused(records, message):
    with pytest.raises(ValueError, match=message):
        Candidates(records, torch.zeros(30, 1, 2, 2))
