"""Checkpoints are fetched once, within a time limit, and only the right ones are kept."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flwr_leakage.metrics.checkpoint import (
    OFFLINE,
    BackboneUnavailableError,
    checkpoint,
    matches,
)

CONTENT = bytes(range(256)) * 1000
NAME = f"net-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pth"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        what = self.path.split("/")[1]
        if what == "none":
            self.send_error(404)
            return
        if what == "silent":
            self.server.over.wait(5)
            return
        content = CONTENT[:-1] if what == "cut" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content), 5000):
            self.wfile.write(content[start : start + 5000])
            if what == "slow" and self.server.over.wait(0.03):
                return

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv(OFFLINE)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads, server.asked, server.over = True, [], threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def test_it_is_fetched_once_however_many_ask(server, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(checkpoint, f"{server.url}/ok/{NAME}", tmp_path, True) for _ in "1234"]
    assert {each.result() for each in asked} == {tmp_path / NAME}
    before = len(server.asked)
    path = checkpoint(f"{server.url}/ok/{NAME}", tmp_path, download=False)
    assert len(server.asked) == before and path.read_bytes() == CONTENT and matches(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("none", "could not be fetched: HTTP Error 404"),
        ("cut", "has another digest than"),
        ("silent", "not there after|timed out"),
        ("slow", "not there after|too slow"),
    ],
)
def test_what_cannot_be_had_leaves_nothing_and_says_what_to_do(server, tmp_path, what, said):
    with pytest.raises(BackboneUnavailableError, match=said) as raised:
        checkpoint(f"{server.url}/{what}/{NAME}", tmp_path, True, seconds=0.3)
    assert f"put {NAME} into {tmp_path}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network(server, tmp_path):
    closed = server.url.replace(str(server.server_port), "1")
    with pytest.raises(BackboneUnavailableError, match="refused"):
        checkpoint(f"{closed}/ok/{NAME}", tmp_path, True)


def test_nothing_is_fetched_where_that_is_forbidden(server, tmp_path, monkeypatch):
    with pytest.raises(BackboneUnavailableError, match="download is off"):
        checkpoint(f"{server.url}/ok/{NAME}", tmp_path, False)
    monkeypatch.setenv(OFFLINE, "1")
    with pytest.raises(BackboneUnavailableError, match=f"{OFFLINE} is set"):
        checkpoint(f"{server.url}/ok/{NAME}", tmp_path, True)
    assert server.asked == []


def test_a_damaged_file_is_not_used(tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT[:-1])
    with pytest.raises(BackboneUnavailableError, match="is damaged"):
        checkpoint(f"https://host/{NAME}", tmp_path, True)
