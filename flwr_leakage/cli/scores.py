"""Print the scores of a run as a table in the terminal."""

from pathlib import Path

from rich.console import Console

from flwr_leakage.cli.table import make_table
from flwr_leakage.tracking import read_run


def print_scores(folder: Path, console: Console) -> None:
    """Print the scores of a run, a row for each score and sample, with whether a larger one leaks
    more.
    """
    place = ("round", "client", "sample")
    rows = [
        (
            *map(str, (record.server_round, record.client_id, record.sample)),
            record.name,
            "–" if record.value is None else f"{record.value:.4g}",
            *(record.unit, record.direction, record.note),
        )
        for record in read_run(folder).records
        if record.kind == "score"
    ]
    headings = (*place, "score", "value", "unit", "direction", "note")
    console.print(make_table(headings, rows, right=place))
