"""Print the scores of a run as a table in the terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_leakage.tracking import read_run


def print_scores(folder: Path, console: Console) -> None:
    """Print every score of a run by sample, with the meaning of a larger value."""
    table = Table(box=None)
    for heading in ("round", "client", "sample"):
        table.add_column(heading, justify="right")
    for heading in ("score", "value", "unit", "direction", "note"):
        table.add_column(heading)
    for record in read_run(folder).records:
        if record.kind == "score":
            place = (record.server_round, record.client_id, record.sample)
            value = "–" if record.value is None else f"{record.value:.4g}"
            texts = (record.name, value, record.unit, record.direction, record.note)
            table.add_row(*map(str, place), *map(Text, texts))
    console.print(table)
