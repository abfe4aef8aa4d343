"""Write lines on an observed run to Flower's log: one after each round, and a few at the run's
end.
"""

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from flwr_leakage.audit import ServerAudit
from flwr_leakage.audit.progress import SilentProgress
from flwr_leakage.records import LeakageRecord
from flwr_leakage.report import write_report
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, ended, fates
from flwr_leakage.report.index import Index, count, values
from flwr_leakage.report.page import as_shown
from flwr_leakage.tracking import JsonlTracker, read_run
from flwr_leakage.tracking.text import plain_text

# The logger is Flower's own, so that Flower's settings of level and format apply.
_LOG = logging.getLogger("flwr")
SECONDS = 15.0
"""The least number of seconds between two log lines about a running attack."""

MAX_REASON = 150
"""The largest number of characters, in the log, of the reason why a client was not attacked."""


class LogProgress(SilentProgress):
    """A reporter of an attack's progress, which writes a log line at most every ``SECONDS``
    seconds.

    ``limit`` is the CPU seconds that an attack may take for each target; ``None`` for no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._last = time.monotonic()
        self._limit = "" if limit is None else f" · at most {limit:g} CPU s each"

    def status(self, text: str) -> None:
        """Write a status text to the log, unless one was written within the last ``SECONDS``."""
        now = time.monotonic()
        if now - self._last >= SECONDS:
            self._last = now
            _LOG.info("flwr-leakage: %s%s", text, self._limit)


class RecentRecords(JsonlTracker):
    """A writer of a run folder's records that also remembers the records since the last call of
    ``take``.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._recent: list[LeakageRecord] = []

    def log(self, record: LeakageRecord) -> None:
        """Append one record to the run folder, and remember it for ``take``."""
        super().log(record)
        self._recent.append(record)

    def take(self) -> list[LeakageRecord]:
        """Return the records that were added since the last call, in their order."""
        taken, self._recent = self._recent, []
        return taken


def tell_round(audit: ServerAudit, server_round: int) -> None:
    """Log the results of a round's attacks in a line; log nothing if no attack is configured."""
    if isinstance(audit.tracker, RecentRecords):
        told = round_told(audit.tracker.take(), audit.keep is not None)
        _LOG.info("flwr-leakage, round %d: %s", server_round, told)


def round_told(records: Sequence[LeakageRecord], is_kept: bool = False) -> str:
    """Return a sentence on a round: the attacked clients, the attacks' CPU time, and the worst
    grade.

    A grade says how well a sample was recovered, from ``nothing`` to ``exact``. ``is_kept`` says
    that updates are stored, so that they can be attacked after the run.
    """
    index = Index(records)
    found, fate = attempts(index), fates(index)
    attacked = {client for _, client in fate.attacked} | {attempt.key[1] for attempt in found}
    clients = {key[1] for key in index.series("client", "images")} | attacked
    clients |= {client for _, client in fate.spared}
    if not clients:
        return "no update was observed (see Events in the report)."
    whole = count(len(clients - {-1}), "client")
    reason = next((plain_text(why, MAX_REASON) for why in fate.spared.values()), "")
    reason = f" (a reason: {reason})" * bool(reason)
    if not attacked:
        return f"kept the updates of {whole}." if is_kept else f"attacked none of {whole}{reason}."
    whom = f"the mean update of {whole}" if -1 in attacked else f"{len(attacked)} of {whole}"
    seconds = sum(values(index.series("cost", "attack_wall_seconds")))
    graded = [attempt for attempt in found if attempt.grade]
    worst = "no grade, as the originals are not known here" if fate.answered else "no result"
    if graded:
        worst = f"worst grade {max(graded, key=lambda attempt: attempt.leak).grade}"
    cut = len(ended(index, found))
    told = f"attacked {whom} in {seconds:.0f} s, {worst}"
    told += f"; time cut off {cut} of {count(len(fate.attacked), 'attack')}" * bool(cut)
    left = len(clients - attacked - {-1}) if -1 not in attacked else 0
    return f"{told}{f'; {left} not attacked{reason}' if left else ''}."


def tell_end(folder: Path) -> None:
    """Write the report of a run that ended, and log its verdict on whether to train on, and its
    advice.
    """
    path = write_report(folder).resolve()
    run = as_shown(read_run(folder))
    advice = advise(Index(run.records), run.metadata, [], run.events)
    _LOG.info("flwr-leakage: May training go on? %s", advice.headline)
    for line in advice.do:
        _LOG.info("flwr-leakage: %s", line)
    _LOG.info("flwr-leakage: Report: %s", path)
    _LOG.info("flwr-leakage: Open it by: python -m webbrowser %s", shlex.quote(path.as_uri()))
