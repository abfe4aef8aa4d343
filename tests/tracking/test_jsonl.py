import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking import JsonlTracker, read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.text import plain_text


def record(value=1.5, server_round=1, **changes):
    note = "ü </script>\u2028\ud800 \n"
    entry = LeakageRecord(
        "r", server_round, 3, 0, "metric", "psnr", value, "dB", "larger is safer", note
    )
    return replace(entry, **changes)


EVENT = RunEvent("r", 1, 4, "error", "ValueError: <b>\r\n")


def rows(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_bytes().splitlines()]


def test_what_is_written_is_read_again(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    records = [record(), record(None, 2), record(-1e-300, 2, kind="score")]
    records += [record(2.0, 2, error=0.5, state="within tolerance")]
    records += [record(None, 2, state="lower bound")]
    for entry in records:
        tracker.log(entry)
    tracker.event(EVENT)
    tracker.image(2, 3, 1, "defended", torch.rand(3, 4, 5))
    tracker.close()
    run = read_run(tmp_path / "run")
    said = plain_text(records[0].note)
    assert said == "ü </script>\\u2028\\ud800 \n"
    assert run.records == tuple(replace(entry, note=said) for entry in records)
    assert run.events == (replace(EVENT, message="ValueError: <b>\\u000d\n"),)
    [image] = run.images
    assert (image.server_round, image.client_id, image.sample, image.role) == (2, 3, 1, "defended")
    assert run.closed and run.problems == () and run.metadata == {}


@pytest.mark.parametrize("channels", [1, 3])
def test_images_keep_their_pixels_to_half_a_level(tmp_path, channels):
    pixels = torch.rand(channels, 5, 7, generator=torch.Generator().manual_seed(0))
    with_tracker = JsonlTracker(tmp_path)
    with_tracker.image(1, 0, 0, "original", pixels)
    [image] = read_run(tmp_path).images
    read = torch.from_numpy(np.asarray(Image.open(image.path), dtype=np.float32) / 255)
    read = read.reshape(5, 7, channels).permute(2, 0, 1)
    assert (read - pixels).abs().max() <= 0.5 / 255 + 1e-6


def test_every_byte_is_in_the_file_before_the_call_returns(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record())
    assert rows(tmp_path)[-1]["type"] == "record"
    assert not read_run(tmp_path).closed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_missing_with_a_reason(tmp_path, value):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(value, note="labels known"))
    tracker.close()
    [read] = read_run(tmp_path).records
    assert read.value is None
    assert read.note == f"value is {value}; labels known"
    assert b"NaN" not in (tmp_path / "records.jsonl").read_bytes()


@settings(deadline=None)  # the first example imports the package's parts
@given(cut=st.integers(1, 200))
def test_a_line_torn_at_any_byte_loses_itself_only(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tracker = JsonlTracker(folder)
    tracker.log(record(1.0))
    size = (folder / "records.jsonl").stat().st_size
    tracker.log(record(2.0))
    tracker.flush()
    full = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(full[: min(size + cut, len(full) - 2)])
    with pytest.warns(UserWarning, match="line 3 of records.jsonl cannot be read"):
        torn = read_run(folder)
    assert [entry.value for entry in torn.records] == [1.0]

    reopened = JsonlTracker(folder, resume=True)
    reopened.log(record(3.0))
    reopened.close()
    with pytest.warns(UserWarning, match="line 3"):
        run = read_run(folder)
    assert [entry.value for entry in run.records] == [1.0, 3.0]
    assert run.closed and len(run.problems) == 1
    assert (folder / "records.jsonl").read_bytes().count(b'\n{"type": "run", "status": "open"') == 1


def test_a_short_write_is_an_error_and_does_not_swallow_the_next_line(tmp_path, monkeypatch):
    tracker = JsonlTracker(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:10]))
    with pytest.raises(OSError, match=r"took 10 of \d+ bytes"):
        tracker.log(record(1.0))
    monkeypatch.setattr(os, "write", write)
    tracker.log(record(2.0))
    with pytest.warns(UserWarning, match="line 2"):
        assert [entry.value for entry in read_run(tmp_path).records] == [2.0]


def test_a_killed_process_loses_nothing_that_was_logged(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from flwr_leakage.records import LeakageRecord\n"
        "from flwr_leakage.tracking import JsonlTracker\n"
        "tracker = JsonlTracker(sys.argv[1])\n"
        "for i in range(100):\n"
        "    tracker.log(LeakageRecord('r', 1, 0, i, 'metric', 'psnr', float(i)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], timeout=120)
    run = read_run(tmp_path / "run")
    assert [entry.value for entry in run.records] == [float(i) for i in range(100)]
    assert not run.closed


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_to_be_continued(tmp_path):
    JsonlTracker(tmp_path).close()
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match=r"which holds a run: choose another"):
        JsonlTracker(tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_reopening_appends(tmp_path):
    for value in (1.0, 2.0):
        tracker = JsonlTracker(tmp_path, resume=True)
        tracker.log(record(value))
        tracker.close()
        tracker.close()
    assert [entry.value for entry in read_run(tmp_path).records] == [1.0, 2.0]
    with pytest.raises(ValueError, match="closed"):
        tracker.log(record())


def test_it_synchronises_when_a_round_has_changed_and_five_seconds_are_over(tmp_path, monkeypatch):
    synchronised, now = [], [0.0]
    tracker = JsonlTracker(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: synchronised.append(now[0]))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for server_round, at in ((1, 0.0), (1, 50.0), (2, 60.0), (3, 64.9), (4, 65.0), (4, 90.0)):
        now[0] = at
        tracker.log(record(server_round=server_round))
    assert synchronised == [60.0, 65.0]
    tracker.close()
    assert synchronised == [60.0, 65.0, 90.0]


def test_only_the_owner_may_read(tmp_path):
    previous = os.umask(0)
    try:
        tracker = JsonlTracker(tmp_path / "outer" / "run")
        tracker.image(1, 0, 0, "original", torch.zeros(1, 2, 2))
        tracker.close()
    finally:
        os.umask(previous)
    folder = tmp_path / "outer" / "run"
    paths = [folder, *folder.rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert len(modes) == 4
    assert all(mode == (0o700 if "." not in name else 0o600) for name, mode in modes.items())


@pytest.mark.parametrize("role", ["../../etc/passwd", "", "Original"])
def test_names_of_images_hold_no_foreign_text(tmp_path, role):
    with pytest.raises(ValueError, match="role must be one of"):
        JsonlTracker(tmp_path).image(1, 2, 3, role, torch.zeros(1, 2, 2))


def test_a_path_in_the_file_is_not_followed(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.image(1, 2, 3, "original", torch.zeros(1, 2, 2))
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text().replace("images/round", "/etc/passwd#"))
    [image] = read_run(tmp_path).images
    assert image.path == tmp_path / "images" / "round0001_client0002_sample0003_original.png"


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"\x00" * 40,
        b"[1]",
        b"{}",
        b'{"type": "other"}',
        b'{"type": "record"}',
        b'{"type": "event", "run": "r", "server_round": 1, "client_id": 0, "level": "shout",'
        b' "message": ""}',
        b'{"type": "image", "server_round": 1, "client_id": 0, "sample": "../x",'
        b' "role": "original"}',
        b'{"type": "image", "server_round": 1, "client_id": 0, "sample": 9, "role": "original"}',
        b'{"type": "image", "server_round": 1, "client_id": 0, "sample": 9, "role": "../a"}',
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_lines_that_cannot_be_read_are_named_and_left_out(tmp_path, line):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(1.0))
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(line + b"\n")
    tracker.log(record(2.0))
    with pytest.warns(UserWarning, match="line 3"):
        run = read_run(tmp_path)
    assert [entry.value for entry in run.records] == [1.0, 2.0]


@pytest.mark.parametrize("value", ["NaN", "1e999", '"12"', "true", "[]", "1" + "0" * 400])
def test_values_that_are_no_finite_number_are_refused(tmp_path, value):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(0.5))
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text().replace('"value": 0.5', f'"value": {value}'))
    with pytest.warns(UserWarning, match="line 2"):
        assert read_run(tmp_path).records == ()


@pytest.mark.parametrize("change", [("null", "-1.0"), ("null", "true"), ('""', '"good"')])
def test_errors_and_states_that_are_none_are_refused(tmp_path, change):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(0.5))
    path = tmp_path / "records.jsonl"
    for name, content in (("error", change), ("state", change)):
        path.write_text(
            path.read_text().replace(f'"{name}": {content[0]}', f'"{name}": {content[1]}')
        )
    with pytest.warns(UserWarning, match="line 2"):
        assert read_run(tmp_path).records == ()


def test_fields_that_nobody_knows_are_ignored(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(record(0.5))
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text().replace('"value": 0.5', '"value": 0.5, "new": 1'))
    assert [entry.value for entry in read_run(tmp_path).records] == [0.5]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a run folder"):
        read_run(tmp_path)


def test_an_atomic_write_leaves_no_temporary_file(tmp_path):
    write_private(tmp_path / "a.txt", b"one")
    write_private(tmp_path / "a.txt", b"two")
    assert (tmp_path / "a.txt").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
