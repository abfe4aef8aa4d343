"""Show the progress of an audit to a person: the round, the attack, its state and its time."""

import time
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.status import Status
from rich.text import Text

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback


def count(amount: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    Example:
        >>> count(1, "update"), count(3, "update")
        ('1 update', '3 updates')
    """
    return f"{amount:,} {noun}{'s' * (amount != 1)}"


@runtime_checkable
class Progress(Protocol):
    """The display of an audit's progress: lines that stay, and one status that changes."""

    def line(self, text: str) -> None:
        """Print a line that later statuses do not overwrite."""

    def status(self, text: str) -> None:
        """Show a text as the current status, which the next status replaces."""

    def close(self) -> None:
        """Remove the status."""


class SilentProgress:
    """A display of progress that shows nothing."""

    def line(self, text: str) -> None:
        """Ignore the text."""

    def status(self, text: str) -> None:
        """Ignore the text."""

    def close(self) -> None:
        """Do nothing."""


class ConsoleProgress:
    """A display of progress by lines and a spinner on a terminal.

    Where the console is no terminal, the status is printed as a line every ``interval`` seconds
    instead.

    Args:
        console: the console to write to; standard output by default.
        interval: the seconds between two status lines where the console is no terminal.
    """

    def __init__(self, console: Console | None = None, interval: float = 15.0) -> None:
        self.console = console or Console()
        self.interval = interval
        self._unicode = self.console.encoding.startswith("utf")
        self._start = time.monotonic()
        self._last_status = self._start
        self._spinner: Status | None = None

    def line(self, text: str) -> None:
        """Print a line that begins with the time since the display was made."""
        text = self._encodable(f"{self._elapsed()}  {text}")
        self.console.print(text, markup=False, highlight=False, emoji=False)

    def status(self, text: str) -> None:
        """Update the spinner; without a terminal, print the status at most every ``interval``
        seconds.
        """
        if self.console.is_terminal:
            if self._spinner is None:
                spinner = "dots" if self._unicode else "line"
                self._spinner = self.console.status("", spinner=spinner)
                self._spinner.start()
            self._spinner.update(Text(self._encodable(f"{self._elapsed()}  {text}")))
            return
        now = time.monotonic()
        if now - self._last_status >= self.interval:
            self._last_status = now
            self.line(f"… {text}")

    def close(self) -> None:
        """Stop the spinner."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _encodable(self, text: str) -> str:
        """Return the text with a substitute for characters that the console cannot encode.

        An encoding error would end the training.
        """
        encoding = self.console.encoding
        return text if self._unicode else text.encode(encoding, "replace").decode(encoding)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60:3d}:{seconds % 60:02d}"


def attack_reporter(progress: Progress, name: str) -> ProgressCallback:
    """Return a callback that shows an attack's progress as the display's status.

    The status begins with ``name``, such as ``round 3/10``.
    """

    def report(now: AttackProgress) -> None:
        part = f"{now.attack} · " if now.attack else ""
        if now.iterations > 1:  # others count no iterations
            part += f"iteration {now.iteration}/{now.iterations} · "
        progress.status(
            f"{name} · attack on {now.total:,} · {now.done} done · {part}"
            f"objective {now.objective:.3g}"
        )

    return report
