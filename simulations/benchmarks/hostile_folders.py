"""Hostile run folders against every command that reads one: none runs, escapes or fills memory.

    python -m simulations.benchmarks.hostile_folders [--only NAME] [--commands report,client]

Each folder is a copy of a small honest run with kept updates in which one thing was changed: a
gadget in its config (``hostile_gadgets``), or an entry or a text (``hostile_entries``). Each
command runs in a child process. Counted are the folders of which something ran, of which a file
outside was opened (inotify), that took more memory than the honest run by over 500 MB, whose text
left alive, and which ended in a traceback or not at all.
"""

import argparse
import csv
import ctypes
import inspect
import logging
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_leakage.cli import app as cli
from flwr_leakage.flower import run_inline
from flwr_leakage.report import write_report
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from simulations.benchmarks.hostile_entries import entries
from simulations.benchmarks.hostile_gadgets import MARK, SECRET, gadgets, prepare, put

SETTINGS = [
    "num_clients=1", "num_rounds=1", "partition=sizes", "partition.sizes=[1]", "model=linear",
    "client.batch_size=1", "score=none", "attack=idlg", "attack.optimizer.iterations=3",
    "what_if=null", "selection.every=1", "server.test_samples=10", "server.attack_later=true",
    "server.attack_chunk=1", "metric=pixel",
]  # fmt: skip
MOST = 500 << 20
"""Bytes that a command may take beyond the honest folder's: one file's bounds, and to spare."""

HARD = 6 << 30
"""Bytes at which a child is stopped in any case, for the sake of the machine."""

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


@dataclass
class Outcome:
    """What one command did with one folder.

    Attributes:
        ran: whether something of the folder ran.
        opened: names outside of the folder that were opened or changed.
        peak: bytes that the command took beyond the process that it was started in.
        alive: texts that a terminal, spreadsheet or browser would obey, in words.
        ended: ``in order``, ``traceback`` or ``not at all``.
        output: what it printed.
    """

    ran: bool = False
    opened: list[str] = field(default_factory=list)
    peak: int = 0
    alive: list[str] = field(default_factory=list)
    ended: str = "in order"
    output: str = ""


def honest_run(folder: Path) -> Path:
    """Make a small run with a kept round, attacked once so that it has images and a report."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = compose(SETTINGS, str(folder))
    server_app = make_server_app(lambda _: config, Console(quiet=True))
    run_inline(server_app, make_client_app(lambda _: build(config)), 1)
    whole = folder.with_name("attacked")
    shutil.copytree(folder, whole)
    outcome = attempt(["attack-kept"], whole, folder.with_name("none"), folder.with_name("ran"))
    assert "1 round attacked" in outcome.output, outcome.output
    shutil.copytree(whole / "images", folder / "images", dirs_exist_ok=True)
    shutil.copy(whole / "records.jsonl", folder / "records.jsonl")
    write_report(folder)
    return folder


def commands(run: Path, honest: Path, out: Path) -> dict[str, list[list[str]]]:
    """The calls of each command that reads a run folder."""
    both = [str(run), str(honest)]
    suffixes = ("html", "csv", "md", "tex", "png")
    bounded = "max_memory" in inspect.signature(cli.attack_kept).parameters
    limits = ["--max-seconds", "2", *(["--max-memory", "2"] if bounded else [])]
    return {
        "report": [["report", str(run)]],
        "compare": [["compare", *both, "-o", str(out / f"table.{s}")] for s in suffixes],
        "export": [
            ["export", *both, "-o", str(out / "runs.csv")],
            ["export", str(run), "-o", str(out / "records.csv"), "--records"],
        ],
        "client": [["client", str(run)]],
        "attack-kept": [["attack-kept", str(run), *limits]],
    }


def attempt(
    names: Sequence[str], run: Path, foreign: Path, ran: Path, seconds: float = 60.0,
    honest: Path | None = None,
) -> Outcome:  # fmt: skip
    """Call commands on a folder, one after the other, in a child process.

    Args:
        names: of the commands.
        run: the folder, which they may change.
        foreign: a folder beside it, nothing of which may be opened.
        ran: a file that is made where something of the folder runs.
        seconds: after which the child is ended.
        honest: another run to compare with.
    """
    out = Path(tempfile.mkdtemp(dir=run.parent))
    (out / "cwd").mkdir()
    before = _contents(foreign)
    listening = _listen(foreign)
    child = os.fork()
    if not child:
        _call(names, run, honest or run, out, ran)
    deadline = time.monotonic() + seconds
    while True:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            break
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    output = (out / "output").read_text(errors="surrogateescape")
    opened = _heard(listening)
    changed = [name for name, content in _contents(foreign).items() if before.get(name) != content]
    lost = sorted(before.keys() - _contents(foreign).keys())
    outcome = Outcome(
        ran=ran.exists() or MARK in output or "Zen of Python" in output or bool(lost),
        opened=sorted({*opened, *changed}),
        peak=(used.ru_maxrss << 10) - int((out / "resident").read_text()),
        alive=[*_alive(run, out, output)],
        ended={-signal.SIGKILL: "not at all", 70: "traceback"}.get(code, "in order"),
        output=output,
    )
    if code < 0 and code != -signal.SIGKILL:
        outcome.ended = "traceback"
    shutil.rmtree(out, ignore_errors=True)
    return outcome


def _call(names: Sequence[str], run: Path, honest: Path, out: Path, ran: Path) -> None:
    """In the child: call the commands; exit with 70 where one ended in a traceback."""
    code = 0
    # Of the child itself: a fork maps no pages of files that its parent had mapped.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    (out / "resident").write_text(str(pages * os.sysconf("SC_PAGE_SIZE")))
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (HARD, HARD))
        descriptor = os.open(out / "output", os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.environ |= {SECRET: MARK, "BROWSER": f"touch {ran} %s"}
        os.chdir(out / "cwd")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="surrogateescape")
        for name in names:
            place = run
            if name == "client":  # it reads folders of this name only
                place = run.rename(run.with_name("run-1-client-0"))
            for arguments in commands(place, honest, out)[name]:
                try:
                    cli.app(arguments)
                except SystemExit:
                    pass
                except BaseException as error:
                    import traceback

                    traceback.print_exception(error)
                    code = 70
            if name == "client":
                place.rename(run)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _contents(folder: Path) -> dict[str, Any]:
    """What the files of a folder hold, as far as a change would show."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.exists() else []:
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return {name: held for name, held in found.items() if not (folder / name).is_dir()}


_IN_OPEN, _IN_NONBLOCK = 0x20, os.O_NONBLOCK


def _listen(folder: Path) -> int:
    """A descriptor that tells which files of a folder are opened, by whatever library."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(_IN_NONBLOCK))
    places = [folder, *(p for p in folder.rglob("*") if p.is_dir())] if folder.exists() else []
    for place in places:
        libc.inotify_add_watch(descriptor, os.fsencode(place), _IN_OPEN)
    return descriptor


def _heard(descriptor: int) -> set[str]:
    names = set()
    try:
        while events := os.read(descriptor, 1 << 16):
            place = 0
            while place < len(events):
                *_, length = struct.unpack_from("iIII", events, place)
                name = events[place + 16 : place + 16 + length].rstrip(b"\0")
                names.add(os.fsdecode(name) or "the folder")
                place += 16 + length
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
    return names


class _Page(HTMLParser):
    """Counts what a browser would obey in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name.startswith("on"):
                self.found.append(f"{tag} {name}")
            leads = name in ("src", "href", "xlink:href", "srcset", "action", "formaction", "data")
            if leads and not re.match(r"data:image/png|#", value or ""):
                self.found.append(f"{tag} to {value}")


def _alive(run: Path, out: Path, output: str) -> list[str]:
    """What of the outputs would be obeyed, in words."""
    found = [f"{_names(output)} in the terminal"] if _names(output) else []
    pages = [run / "report.html"] if not (run / "report.html").is_symlink() else []
    for path in [*pages, *sorted(out.glob("*.*"))]:
        if path.suffix not in (".html", ".csv", ".md", ".tex") or not path.is_file():
            continue
        text = path.read_text()
        told = [f"hidden {_names(text)}"] if _names(text) else []
        if path.suffix == ".html":
            page = _Page()
            page.feed(text)
            told += page.found + [f"{page.scripts} scripts"] * (page.scripts > 1)
        if path.suffix == ".csv":
            told += [c for row in csv.reader(text.splitlines(True)) for c in row if _runs(c)]
        if path.suffix == ".md":
            told += re.findall(r"(?<!\\)\]\(\S*|<\w+|://|(?<!\\)\$.", text)
            rows = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in text.splitlines()]
            told += ["a torn row"] * (len(set(rows)) > 1)
        if path.suffix == ".tex":
            told += re.findall(r"\\(?:input|write18)\W|(?<!\\)\$x", text)
        found += [f"{each} in {path.name}" for each in told]
    return found


def _names(text: str) -> str:
    hidden = sorted({c for c in text if c not in "\n\t" and unicodedata.category(c) in _HIDDEN})
    return ", ".join(f"U+{ord(c):04X}" for c in hidden)


def _runs(cell: str) -> bool:
    """Whether a spreadsheet may take a cell, or a part of it that a separator begins, to run."""
    parts = re.split(r"[;\t\r\n]", cell)
    number = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
    return any(
        p.strip()[:1] in tuple("=+-@＝＋－＠") and not number.fullmatch(p.strip())
        for p in parts
        if p.strip()
    )


def cases(foreign: Path, ran: Path) -> dict[str, Callable[[Path, Path], Path | None]]:
    """Every change that makes an honest folder hostile, by name; ``none`` leaves it honest."""
    found: dict[str, Callable[[Path, Path], Path | None]] = {"none": lambda run, _: None}
    for name, (place, content) in gadgets(foreign, ran).items():
        found[f"gadget: {name}"] = lambda run, _, p=place, c=content: put(run, p, c)
    return found | {f"entry: {name}": change for name, change in entries().items()}


@dataclass(frozen=True)
class Place:
    """Where one hostile folder lies: a run folder, and beside it what it must not touch."""

    run: Path
    foreign: Path
    ran: Path


def place(around: Path, honest: Path, name: str) -> Place:
    """Make a folder hostile, in an empty folder that is named after no case."""
    foreign, ran, run = around / "foreign", around / "ran", around / "run"
    prepare(foreign, ran)
    shutil.copytree(honest, run)
    run = cases(foreign, ran)[name](run, foreign) or run
    return Place(run, foreign, ran)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--commands", default="", help="some of the commands; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="most of a command")
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        honest = honest_run(Path(folder) / "honest")
        probe = list(commands(honest, honest, honest))
        probe = chosen.commands.split(",") if chosen.commands else probe
        baseline = {}
        found: dict[str, dict[str, Outcome]] = {name: {} for name in probe}
        names = [n for n in cases(honest, honest) if chosen.only in n or n == "none"]
        for case in names:
            for verb in probe:
                with tempfile.TemporaryDirectory(dir=folder) as around:
                    made = place(Path(around), honest, case)
                    outcome = attempt(
                        [verb], made.run, made.foreign, made.ran, chosen.seconds, honest
                    )
                if case == "none":
                    baseline[verb] = outcome
                    if outcome.ran or outcome.opened:
                        raise SystemExit(f"the honest folder is no baseline of {verb}: {outcome}")
                    continue
                known = baseline[verb].alive  # such as links to the reports of both folders
                outcome.alive = [each for each in outcome.alive if each not in known]
                found[verb][case] = outcome
                if chosen.verbose:
                    _tell(case, verb, outcome, baseline[verb])
    print(f"{sum(n.startswith('gadget') for n in names)} gadgets, "
          f"{sum(n.startswith('entry') for n in names)} hostile entries and texts.\n")  # fmt: skip
    print("| command | ran | opened outside | over 500 MB | peak, MB | alive | traceback | hung |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for verb, outcomes in found.items():
        all_of, base = list(outcomes.values()), baseline[verb].peak
        peaks = [max(o.peak - base, 0) for o in all_of]
        counts = (
            sum(o.ran for o in all_of), sum(bool(o.opened) for o in all_of),
            sum(peak > MOST for peak in peaks), round(max(peaks, default=0) / 1e6),
            sum(bool(o.alive) for o in all_of), sum(o.ended == "traceback" for o in all_of),
            sum(o.ended == "not at all" for o in all_of),
        )  # fmt: skip
        print(f"| `{verb}` | " + " | ".join(map(str, counts)) + " |")


def _tell(case: str, verb: str, outcome: Outcome, base: Outcome) -> None:
    said = [
        "ran" * outcome.ran,
        f"opened {outcome.opened}" * bool(outcome.opened),
        f"alive {outcome.alive[:3]}" * bool(outcome.alive),
        f"ended {outcome.ended}" * (outcome.ended != "in order"),
        f"{outcome.peak / 1e6:.0f} MB" * (outcome.peak - base.peak > MOST),
    ]
    if any(said):
        last = outcome.output.strip().splitlines()[-1:] or [""]
        print(f"{verb}: {case}: {'; '.join(filter(None, said))} ({last[0][:200]!r})", flush=True)


if __name__ == "__main__":
    main()
