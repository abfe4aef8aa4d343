"""A run that is watched: its page is served on this machine, and to nobody who names another."""

import http.client
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import takewhile

import pytest
from browser import started_browser
from report_page import fill
from rich.console import Console
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.cli.watch import print_lines
from flwr_leakage.records import LeakageRecord
from flwr_leakage.report import render_report
from flwr_leakage.report.live import serve
from flwr_leakage.tracking import JsonlTracker, read_run


def end_round(tracker, server_round):
    tracker.log(LeakageRecord("demo", server_round, -1, -1, "cost", "round_wall_seconds", 1.0, "s"))


@pytest.fixture
def watched(tmp_path):
    """A run that goes on, its tracker, and the port of its page."""
    fill(tracker := JsonlTracker(tmp_path / "run"))
    server, _ = serve(tmp_path / "run", 0)
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tmp_path / "run", tracker, server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(port, path="/", hosts=("127.0.0.1",), method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer


def test_the_page_is_the_report_with_a_script_that_asks_for_news(watched):
    folder, _, port = watched
    status, page, answer = ask(port)
    assert status == 200 and "Live: it is shown anew" in page and "connect-src 'self'" in page
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    saved = render_report(read_run(folder))
    assert "state.json" not in saved and "connect-src" not in saved and "fetch(" not in saved


def test_the_page_is_made_anew_when_a_round_ends_and_not_before(watched):
    _, tracker, port = watched
    before, state = ask(port)[1], ask(port, "/state.json")[1]
    tracker.log(LeakageRecord("demo", 3, -1, -1, "utility", "test_accuracy", 0.875))
    assert ask(port)[1] == before and ask(port, "/state.json")[1] == state
    end_round(tracker, 3)
    assert ask(port, "/state.json")[1] != state
    assert "87.5" in ask(port)[1] and "87.5" not in before


@pytest.mark.parametrize(
    "hosts",
    [(), ("evil.example",), ("127.0.0.1.evil.example",), ("localhost@evil.example",), ("[",),
     ("10.0.0.1",), ("127.0.0.1", "evil.example"), ("",), ("evil.example:8765",)],
)  # fmt: skip
def test_no_page_of_another_host_reads_it(watched, hosts):
    for path in ("/", "/state.json"):
        status, body, _ = ask(watched[2], path, hosts)
        assert status in (400, 403) and "demo" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:80"])
def test_the_near_end_of_a_tunnel_may_have_another_port(watched, host):
    assert ask(watched[2], "/state.json", (host,))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/run.json", "/records.jsonl", "/../../etc/passwd", "//etc/passwd", "/%2e%2e/secret",
     "/images/round0001_client0000_sample0000_original.png", "/state.json/..", "secret"],
)  # fmt: skip
def test_no_file_is_served(watched, path):
    assert ask(watched[2], path)[0] == 404


def test_nothing_is_sent_to_it(watched):
    assert ask(watched[2], method="POST")[0] == 501


def test_a_record_that_leads_out_of_the_folder_is_not_shown(watched):
    folder, tracker, port = watched
    tracker.close()
    secret = folder.parent / "secret"
    (folder / "records.jsonl").rename(secret)
    (folder / "records.jsonl").symlink_to(secret)
    status, body, _ = ask(port)
    assert status == 500 and "symbolic link" in body and "demo" not in body


def test_a_browser_shows_the_next_round_by_itself_and_keeps_what_is_unfolded(watched):
    _, tracker, port = watched
    with started_browser() as page:
        page.show(f"http://127.0.0.1:{port}/", 1280)
        page.evaluate("document.getElementById('costs').closest('details').open = true")
        tracker.log(LeakageRecord("demo", 3, -1, -1, "utility", "test_accuracy", 0.875))
        end_round(tracker, 3)
        end = time.monotonic() + 60
        shown = "document.readyState === 'complete' && document.body.textContent.includes('87.5')"
        while not page.evaluate(shown):
            assert time.monotonic() < end
            time.sleep(0.5)
        assert page.evaluate("document.getElementById('costs').closest('details').open")
        assert page.complaints == []


def test_the_command_serves_prints_the_tunnel_and_ends_by_ctrl_c(watched):
    folder, _, _ = watched
    command = [sys.executable, "-m", "flwr_leakage.cli", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell that starts the tests in the background lets them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        port = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())[1]
        assert f"ssh -L {port}:127.0.0.1:{port} " in process.stdout.readline()
        assert "Live: it is shown anew" in ask(int(port))[1]
        lines = iter(process.stdout.readline, "")  # Ctrl-C comes once the run was shown
        shown = "".join(takewhile(lambda line: "Unfinished run" not in line, lines))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Not as it is" in shown


def test_what_is_printed_into_a_file_has_a_line_for_each_round_that_ends(watched):
    folder, tracker, _ = watched
    out = io.StringIO()
    runs = (read_run(folder) for _ in range(4))

    def each():
        yield next(runs)
        for server_round in (3, 4):
            end_round(tracker, server_round)
            yield next(runs)
        tracker.close()
        yield next(runs)

    print_lines(each(), Console(file=out, width=20))
    told = out.getvalue().splitlines()
    assert [line.partition(":")[0] for line in told if line.startswith("Round")] == [
        "Round 3", "Round 4",
    ]  # fmt: skip
    assert sum(line.startswith("Not as it is") for line in told) == 1
    assert told[-1] == "The run ended."


def test_what_cannot_be_watched_is_told(watched, tmp_path):
    folder, _, port = watched
    for more, words in (
        ([str(folder), "--port", str(port)], f"port {port} cannot be used"),
        ([str(tmp_path), "--port", "0"], "expected a run folder"),
    ):
        done = CliRunner().invoke(app, ["watch", "--no-browser", *more])
        assert done.exit_code == 2 and words in done.stderr
