"""Make tables for the terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text


def make_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> Table:
    """Return a table for the terminal, whose cells are shown as they are, without markup.

    Columns whose headings are in ``right`` are aligned to the right.
    """
    table = Table(box=None)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
