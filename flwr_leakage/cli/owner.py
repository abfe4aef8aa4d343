"""Print a client's own record of its scores and decisions, as a table by round."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console

from flwr_leakage.cli.table import make_table
from flwr_leakage.records import LeakageRecord
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from flwr_leakage.tracking.text import plain_text

OWN_FOLDER = "run-*-client-*"
"""The pattern of the names of folders in which clients keep their own records. An asterisk stands
for the id of the run or the client.
"""


def own_folders(folder: Path) -> list[Path]:
    """Return the folders of the records that clients keep for themselves.

    ``folder`` is one such folder, which is then the only one returned, or holds several.

    Raises:
        FileNotFoundError: the folder neither is nor holds such a folder.
        ValueError: the folder holds the record of a server.
    """
    if (folder / RECORDS_FILE).exists():
        if not fnmatch(folder.resolve().name, OWN_FOLDER):
            raise ValueError(f"{folder} is a server's run, not a client's own: read its report.")
        return [folder]
    found = sorted(
        path.parent
        for path in folder.glob(f"{OWN_FOLDER}/{RECORDS_FILE}")
        if not path.parent.is_symlink()  # a link may lead to somebody else's record
    )
    if not found:
        raise FileNotFoundError(
            f"expected a client's record, or a folder of them such as ClientAudit(folder=…) "
            f"names, got {folder}."
        )
    return found


def print_own(folder: Path, console: Console) -> None:
    """Print what a client recorded for itself, a row for each round and quantity.

    The quantities are the scores of its samples and the metrics of its attacks on its own updates.
    Of several samples the riskiest value is shown. The client's decisions to send or withhold an
    update follow by round. ``folder`` holds the client's own record.
    """
    run = read_run(folder)
    console.print(plain_text(folder.name), markup=False, style="bold")
    cells = []
    for (server_round, name), rows in _by_quantity(run.records).items():
        values = [row.value for row in rows if row.value is not None]
        riskiest = min if rows[0].direction == "larger is safer" else max
        shown = f"{riskiest(values):.4g}" if values else "–"
        notes = sorted({row.note for row in rows if row.note})
        count = f"{len(values)} of {len(rows)}"
        told = "; ".join(notes)[:200]
        cells.append((str(server_round), name, shown, rows[0].unit, count, told))
    headings = ("round", "quantity", "riskiest", "unit", "samples", "note")
    console.print(make_table(headings, cells, right=("round",)))
    for server_round in sorted({row.server_round for row in run.records}):
        for event in run.events:
            if event.server_round == server_round:
                console.print(f"round {server_round}: {event.message}", markup=False)


def _by_quantity(records: Iterable[LeakageRecord]) -> dict[tuple[int, str], list[LeakageRecord]]:
    """Return a client's records of scores and of attacks on its own updates, by (round, name)."""
    before = {"score": "", "metric": "self-attack: ", "attack": "self-attack: "}
    found: dict[tuple[int, str], list[LeakageRecord]] = {}
    for record in records:
        if record.kind in before:
            name = f"{before[record.kind]}{record.name}"
            found.setdefault((record.server_round, name), []).append(record)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[1][0].kind)))
