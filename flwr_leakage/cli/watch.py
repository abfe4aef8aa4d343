"""A run while it trains: its page on this machine, and its table in the terminal."""

import getpass
import os
import socket
import threading
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flwr_leakage.report.advice import advise
from flwr_leakage.report.index import Index
from flwr_leakage.report.live import serve
from flwr_leakage.report.page import rounds_of, unfinished
from flwr_leakage.simulation.summary import summary_table
from flwr_leakage.tracking import RunData

SECONDS = 1.0
"""From one look at the record to the next."""


def watch_run(folder: Path, port: int, browser: bool, console: Console) -> None:
    """Serve and show a run until the user ends it by Ctrl-C.

    Args:
        folder: the run folder.
        port: of the page; 0 for any that is free.
        browser: whether a browser is opened, unless this is an SSH session.
        console: where the table is shown.

    Raises:
        FileNotFoundError: it is no run folder.
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
        with (
            suppress(KeyboardInterrupt),
            Live(view(run), console=console, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(SECONDS)
                if (now := page.run()) is not run:
                    run = now
                    live.update(view(run), refresh=True)
        server.shutdown()


def view(run: RunData) -> Group:
    """Return what the terminal shows of a run: the verdict so far, and a line a round."""
    index = Index(run.records)
    headline = advise(index, run.metadata, [], run.events).headline
    state = unfinished(run, rounds_of(index)) or "The run ended."
    return Group(Text(headline, style="bold"), Text(state, style="dim"), summary_table(run))
