"""What cannot be written is told and counted, and ends nothing."""

import errno
import os

import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking import GuardedTracker, JsonlTracker, read_run

RECORD = LeakageRecord("r", 1, 0, 0, "metric", "psnr", 20.0, "dB")


def test_a_full_disk_is_told_once_and_the_rest_is_kept_when_there_is_room(tmp_path, monkeypatch):
    told, write = [], os.write
    tracker = GuardedTracker(JsonlTracker(tmp_path), told.append)
    tracker.log(RECORD)

    def full(descriptor, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        tracker.log(RECORD)
    tracker.event(RunEvent("r", 1, 0, "warning", "lost too"))
    assert len(told) == 1
    assert "The training goes on" in told[0]
    assert "No space left" in told[0]
    monkeypatch.setattr(os, "write", write)
    tracker.log(RECORD)
    tracker.close()
    run = read_run(tmp_path)
    assert len(run.records) == 2
    assert [event.message for event in run.events] == [
        "4 entries were lost, as JsonlTracker could not record them."
    ]
    assert run.closed


def test_what_is_lost_to_the_end_is_told_to_the_person(tmp_path, monkeypatch):
    told = []
    tracker = GuardedTracker(JsonlTracker(tmp_path), told.append)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    tracker.log(RECORD)
    tracker.image(1, 0, 0, "original", torch.zeros(5))  # a wrong shape, which ends nothing either
    tracker.close()
    assert len(told) == 3
    assert told[1].startswith("2 entries")
    assert "could not be closed" in told[2]
