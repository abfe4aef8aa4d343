"""Serve the report of a run on this machine while it trains, and update it after each round.

Only the page and a small JSON file are served, so that no request can name another file. A request
must name a loopback host, so that a website whose name was made to resolve to this machine (DNS
rebinding) gets nothing.
"""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flwr_leakage.report.page import render_report
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from flwr_leakage.untrusted import MAX_LINE_BYTES, MAX_RECORDS_BYTES, inside, open_file

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names of the host by which a browser on this machine, or at the other end of a tunnel, asks
the server.
"""

_ENDS = (b'"name": "round_wall_seconds"', b'{"type": "run", "status"')
"""The texts in a line of ``records.jsonl`` by which the end of a round, or the beginning or end of
a run, is recognised.
"""


class Changes:
    """A counter of the rounds of a run folder that have ended.

    The counter reads each line of the growing file of records once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset = self._count = 0
        self._lock = threading.Lock()

    def count(self) -> int:
        """Return the number of ended rounds so far, plus the beginnings and ends of the run.

        Raises:
            ValueError: the file of records is no regular file inside the folder, or is too large.
        """
        with self._lock:
            if not (self._folder / RECORDS_FILE).exists():
                return 0
            with open_file(inside(self._folder, RECORDS_FILE), MAX_RECORDS_BYTES) as file:
                file.seek(self._offset)
                while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                    self._offset = file.tell()
                    self._count += any(end in line for end in _ENDS)
            return self._count


class LivePage:
    """The report's page of a run folder, rendered once after each round that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changes = Changes(folder)
        self._lock = threading.Lock()
        self._shown = -1
        self._run: RunData | None = None
        self._html = b""

    def run(self) -> RunData:
        """Return the data of the run as of the last round that ended.

        Raises:
            FileNotFoundError: the folder is no run folder.
            ValueError: the run cannot be read.
        """
        with self._lock:
            self._update()
            assert self._run is not None
            return self._run

    def html(self) -> bytes:
        """Return the page as UTF-8 HTML; its script asks only this server for newer rounds."""
        with self._lock:
            self._update()
            if not self._html and self._run is not None:
                page = render_report(self._run, live=str(self._shown))
                self._html = page.encode("utf-8", errors="replace")
            return self._html

    def _update(self) -> None:
        if (now := self.changes.count()) != self._shown or self._run is None:
            self._run, self._html, self._shown = read_run(self.folder), b"", now


def serve(folder: Path, port: int) -> tuple[ThreadingHTTPServer, LivePage]:
    """Return a server of a run's report on 127.0.0.1, and the page that it serves.

    The server begins when its ``serve_forever`` is called. With ``port`` 0 any free port is taken.

    Raises:
        OSError: the port is taken.
    """
    page = LivePage(folder)

    class Handler(_Handler):
        live = page

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server, page


class _Handler(BaseHTTPRequestHandler):
    live: LivePage
    server_version, sys_version = "flwr-leakage", ""

    def do_GET(self) -> None:
        """Answer ``/`` with the page, and ``/state.json`` with the number of ended rounds."""
        if not is_loopback(self.headers.get_all("Host") or []):
            self._answer(HTTPStatus.FORBIDDEN, b"Ask for 127.0.0.1 or localhost.\n")
            return
        try:
            if self.path == "/":
                self._answer(HTTPStatus.OK, self.live.html(), "text/html")
            elif self.path == "/state.json":
                state = json.dumps({"changes": str(self.live.changes.count())})
                self._answer(HTTPStatus.OK, state.encode(), "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"There is the page at / and nothing else.\n")
        except (OSError, ValueError) as error:
            told = f"The run cannot be shown: {error}\n".encode(errors="replace")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, told)

    def _answer(self, status: HTTPStatus, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, so that requests leave no lines in the run's terminal."""


def is_loopback(hosts: list[str]) -> bool:
    """Return whether ``hosts``, the ``Host`` headers of a request, are a single one that names this
    machine itself.

    Example:
        >>> is_loopback(["localhost:8000"]), is_loopback(["127.0.0.1.evil.org"]), is_loopback([])
        (True, False, False)
    """
    if len(hosts) != 1:
        return False
    try:
        return urlsplit(f"//{hosts[0]}").hostname in LOOPBACK and "@" not in hosts[0]
    except ValueError:
        return False
