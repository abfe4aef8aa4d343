"""Format scores as a table of samples by measurements, for the terminal and for notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flwr_leakage.records import Measurement, State

_MARKS = {"lower bound": "≥ ", "upper bound": "≤ "}


@dataclass(frozen=True)
class Column:
    """A column of the table: a measurement under the name of its score.

    Attributes:
        score: the name under which the score was asked for.
        measurement: the measurement of all samples.
        error: why the score failed; empty if it did not.
    """

    score: str
    measurement: Measurement
    error: str = ""

    @property
    def title(self) -> str:
        """Return the score's name, with the measurement's name if that differs."""
        name = self.measurement.name
        return self.score if name == self.score or self.error else f"{self.score}: {name}"

    def entries(self) -> list[tuple[float | None, float | None, State | None, str]]:
        """Return the value, half its error bar, its state and its note, for each sample."""
        measured, count = self.measurement, len(self.measurement.values)
        errors = measured.errors or (None,) * count
        states = measured.states or (None,) * count
        notes = measured.notes or ("",) * count
        return list(zip(measured.values, errors, states, notes, strict=True))


@dataclass(frozen=True)
class _Grid:
    """The texts of a table of scores: the rows of its head, its rows of samples, the remarks in the
    order of their numbers, and the number of samples that are not shown. A cell refers to a remark
    by the remark's number in brackets.
    """

    head: list[list[str]]
    rows: list[list[str]]
    remarks: list[str]
    hidden: int


def to_text(columns: Sequence[Column], notes: Sequence[str], most_rows: int) -> str:
    """Return the table as lines of text, with the first ``most_rows`` samples. ``notes`` are
    remarks on all columns, which stand above the table.
    """
    grid = _grid(columns, most_rows)
    lines = [f"! {note}" for note in notes]
    every = grid.head + grid.rows
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    for index, row in enumerate(every):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
        if index == len(grid.head) - 1:
            lines.append("─" * len("  ".join(cells)))
    lines += _hidden(grid)
    lines += [f"[{number}] {remark}" for number, remark in enumerate(grid.remarks, 1)]
    return "\n".join(lines)


def to_html(columns: Sequence[Column], notes: Sequence[str], most_rows: int) -> str:
    """Return the table as HTML, with every text escaped; see ``to_text``."""
    grid = _grid(columns, most_rows)
    body = [_tag("tr", [_tag("th", [escape(cell)]) for cell in row]) for row in grid.head]
    body += [_tag("tr", [_tag("td", [escape(cell)]) for cell in row]) for row in grid.rows]
    warned = [_tag("p", [_tag("strong", [escape(note)])]) for note in notes]
    after = [_tag("p", [escape(line)]) for line in _hidden(grid)]
    remarks = [_tag("li", [escape(remark)]) for remark in grid.remarks]
    parts = [*warned, _tag("table", body), *after, *([_tag("ol", remarks)] if remarks else [])]
    return _tag("div", parts)


def _tag(name: str, parts: Sequence[str]) -> str:
    return f"<{name}>{''.join(parts)}</{name}>"


def _hidden(grid: _Grid) -> list[str]:
    return [f"… and {grid.hidden} more samples (to_pandas() has all)"] if grid.hidden else []


def _grid(columns: Sequence[Column], most_rows: int) -> _Grid:
    count = max((len(column.measurement.values) for column in columns), default=0)
    shown = min(count, most_rows)
    remarks: list[str] = []
    head = [
        ["sample", *(column.title for column in columns)],
        ["", *(column.measurement.direction or "failed" for column in columns)],
        ["unit", *(column.measurement.unit or "–" for column in columns)],
    ]
    rows = [[str(sample)] for sample in range(shown)]
    for column in columns:
        for row, entry in zip(rows, column.entries(), strict=False):
            row.append(_cell(*entry, remarks))
    return _Grid(head, rows, remarks, count - shown)


def _cell(
    value: float | None, error: float | None, state: State | None, note: str, remarks: list[str]
) -> str:
    """Return a cell's text: the value with its error bar and a mark for its state, or a dash if
    there is no value. The number of the cell's remark in ``remarks`` follows, to which a new remark
    is added.
    """
    if note and note not in remarks:
        remarks.append(note)
    mark = f" [{remarks.index(note) + 1}]" if note else ""
    if value is None:
        return f"–{mark}"
    bar = "" if error is None else f" ± {error:.1g}"
    return f"{_MARKS.get(state or '', '')}{value:.4g}{bar}{mark}"
