"""Show a run while it trains, on a page that this machine serves, and in the terminal."""

import getpass
import os
import socket
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flwr_leakage.flower.log_lines import round_told
from flwr_leakage.report.advice import advise
from flwr_leakage.report.index import Index, grouped
from flwr_leakage.report.live import LivePage, serve
from flwr_leakage.report.page import rounds_of, unfinished
from flwr_leakage.simulation.summary import summary_table
from flwr_leakage.tracking import RunData

SECONDS = 1.0
"""The seconds between two looks at the file of records. A line of records thus shows up at most one
second late.
"""


def watch_run(folder: Path, port: int, browser: bool, console: Console) -> None:
    """Serve the page of a run and show the run in the terminal, until the user presses Ctrl-C.

    With ``port`` 0 any free port is taken. ``browser`` tells whether the page is opened in a
    browser, except in an SSH session.

    Raises:
        FileNotFoundError: the folder is no run folder.
        OSError: the port is taken.
    """
    try:
        server, page = serve(folder, port)
    except OSError as error:
        raise OSError(f"port {port} cannot be used ({error}): choose another by --port.") from error
    with server:
        run, port = page.run(), server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        is_remote = "SSH_CONNECTION" in os.environ
        where = f"Page: http://127.0.0.1:{port} (on this machine only; Ctrl-C ends it)"
        if is_remote or not browser:
            tunnel = f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"
            where += f"\nFrom another machine, first: {tunnel}"
        console.print(where, markup=False, highlight=False, soft_wrap=True)
        if browser and not is_remote:
            webbrowser.open(f"http://127.0.0.1:{port}")
        with suppress(KeyboardInterrupt):
            show = _show_table if console.is_terminal else print_lines
            show(_each(page, run), console)
        server.shutdown()


def _each(page: LivePage, run: RunData) -> Iterator[RunData]:
    """Yield ``run``, the data of a run, and then its new data whenever a round has
    ended, for ever.
    """
    yield run
    while True:
        time.sleep(SECONDS)
        if (now := page.run()) is not run:
            yield (run := now)


def _show_table(runs: Iterator[RunData], console: Console) -> None:
    with Live(view(next(runs)), console=console, auto_refresh=False) as live:
        for run in runs:
            live.update(view(run), refresh=True)


def print_lines(runs: Iterator[RunData], console: Console) -> None:
    """Print each line on a run that is new or has changed, for output to a file or a pipe.

    ``runs`` yields the run's data again after each round.
    """
    told: dict[str, str] = {}
    for run in runs:
        now = lines(run)
        for name in (name for name in now if told.get(name) != now[name]):
            console.print(now[name], markup=False, highlight=False, soft_wrap=True)
        told = now


def lines(run: RunData) -> dict[str, str]:
    """Return the lines to print on a run: its ended rounds, the verdict, and whether the run is
    over.

    The keys ``round 1``, ``headline`` and ``state`` stay the same from call to call, so that
    changed lines can be found.
    """
    records_of = grouped((record.server_round, record) for record in run.records)
    ended = sorted(r.server_round for r in run.records if r.name == "round_wall_seconds")
    told = {f"round {n}": f"Round {n}: {round_told(records_of[n])}" for n in ended}
    headline, state = _verdict(run)
    return {**told, "headline": headline, "state": state}


def view(run: RunData) -> Group:
    """Return the terminal's view of a run: the verdict so far, and a line for each round."""
    headline, state = _verdict(run)
    return Group(Text(headline, style="bold"), Text(state, style="dim"), summary_table(run))


def _verdict(run: RunData) -> tuple[str, str]:
    index = Index(run.records)
    headline = advise(index, run.metadata, [], run.events).headline
    return headline, unfinished(run, rounds_of(index)) or "The run ended."
