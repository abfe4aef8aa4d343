"""What a person sees: lines that stay, a status now and then, and nothing read as markup."""

import io

import pytest
from rich.console import Console

from flwr_leakage.attacks.base import AttackProgress
from flwr_leakage.audit import progress as module
from flwr_leakage.audit.progress import Progress
from flwr_leakage.flower import ConsoleProgress, SilentProgress

HOSTILE = r"client said [/nope] \[bold] [red]no[/red] :smile:"


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def _console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def test_a_status_tells_iterations_only_of_attacks_that_count_them():
    shown = []

    class Shown(SilentProgress):
        def status(self, text):
            shown.append(text)

    report = module.attack_reporter(Shown(), "round 1")
    report(AttackProgress(1, 3, 1, 1, 0.25, "analytic"))
    report(AttackProgress(1, 3, 7, 50, 0.25, "idlg"))
    assert shown == [
        "round 1 · attack on 3 · 1 done · analytic · objective 0.25",
        "round 1 · attack on 3 · 1 done · idlg · iteration 7/50 · objective 0.25",
    ]


def test_both_are_progresses():
    assert isinstance(SilentProgress(), Progress)
    assert isinstance(ConsoleProgress(_console()), Progress)


def test_silence(capsys):
    progress = SilentProgress()
    progress.line("a")
    progress.status("b")
    progress.close()
    assert capsys.readouterr().out == ""


def test_lines_carry_the_time_since_the_start(clock):
    console = _console()
    progress = ConsoleProgress(console)
    progress.line("first")
    clock[0] += 125
    progress.line("second")
    assert console.file.getvalue().splitlines() == ["  0:00  first", "  2:05  second"]


def test_without_a_terminal_the_status_is_a_line_now_and_then(clock):
    console = _console()
    progress = ConsoleProgress(console, interval=10.0)
    for second in range(25):
        clock[0] = 100.0 + second
        progress.status(f"step {second}")
    progress.close()
    assert console.file.getvalue().splitlines() == ["  0:10  … step 10", "  0:20  … step 20"]


@pytest.mark.parametrize("terminal", [False, True])
def test_foreign_text_is_shown_as_it_is(terminal):
    console = _console(terminal)
    progress = ConsoleProgress(console, interval=0.0)
    progress.status(HOSTILE)
    progress.line(HOSTILE)
    if terminal:
        console.print(progress._spinner.renderable)
    progress.close()
    assert console.file.getvalue().count(HOSTILE) >= 2


def test_closing_twice_is_allowed_and_a_status_starts_again():
    progress = ConsoleProgress(_console(terminal=True))
    progress.close()
    progress.status("again")
    assert progress._spinner is not None
    progress.close()
    progress.close()
    assert progress._spinner is None


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_without_unicode_gets_what_it_can_show(terminal):
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding="ascii")
    progress = ConsoleProgress(Console(file=file, force_terminal=terminal), interval=0.0)
    progress.status("λmax · round 1")
    progress.line("ε = 3 · 2 updates")
    progress.close()
    file.flush()
    assert b"? = 3 ? 2 updates" in written.getvalue()
