"""Write comparisons and records as tables in files that other programs read."""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_leakage.comparison.compare import Comparison, run_folders
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.text import plain_text

if TYPE_CHECKING:
    import pandas as pd

FORMATS = {"csv": ".csv", "latex": ".tex", "markdown": ".md", "parquet": ".parquet"}
"""For each format of exported tables, the suffix of its files."""


def export(comparison: Comparison, path: str | Path, per_run: bool = False) -> Path:
    """Write a comparison to a file, in the format of its suffix: .csv, .tex, .md or .parquet.

    CSV and Parquet hold plain numbers, with mean and spread apart; LaTeX and Markdown hold the
    table as ``flwr-leakage compare`` prints it. Only the file's owner can read the file.

    Args:
        comparison: the comparison to write.
        path: the path of the file, which is also returned.
        per_run: whether rows are runs, not groups of seeds; for CSV and Parquet only.

    Raises:
        ValueError: the suffix is none of these, or ``per_run`` is set for LaTeX or Markdown.
        ImportError: the file is Parquet and pyarrow is not installed
            (``pip install 'flwr-leakage[parquet]'``).
    """
    path = Path(path)
    if path.suffix not in FORMATS.values():
        raise ValueError(
            f"a file must end in one of {sorted(FORMATS.values())}, or in .html (a page) or .png "
            f"(the frontier) for the command, got {path.name!r}."
        )
    if path.suffix in (".tex", ".md"):
        if per_run:
            raise ValueError(f"per_run is for .csv and .parquet, got {path.name!r}.")
        text = f"{comparison}\n" if path.suffix == ".md" else _latex(comparison)
        write_private(path, text.encode())
        return path
    frame = comparison.runs_to_pandas() if per_run else comparison.to_pandas()
    _write_frame(frame, path)
    return path


def _latex(comparison: Comparison) -> str:
    """Return the comparison as a LaTeX ``booktabs`` table with special characters escaped."""
    import pandas as pd

    headings, rows = comparison.cells()
    frame = pd.DataFrame(rows, columns=[_escape(heading) for heading in headings])
    escaped = frame.map(_escape)
    columns = "l" * len(comparison.labels) + "r" * (len(headings) - len(comparison.labels))
    return str(escaped.to_latex(index=False, column_format=columns))


def _escape(text: str) -> str:
    for plain, escaped in _LATEX:
        text = text.replace(plain, escaped)
    return text


_LATEX = (
    ("\\", "\\textbackslash "), ("&", "\\&"), ("%", "\\%"), ("$", "\\$"), ("#", "\\#"),
    ("_", "\\_"), ("{", "\\{"), ("}", "\\}"), ("~", "\\textasciitilde "),
    ("^", "\\textasciicircum "), ("±", "$\\pm$"), ("≥", "$\\geq$"), ("–", "--"), ("\n", " "),
    ("\t", " "), ("`", "\\textasciigrave "), ("|", "\\textbar "), ("<", "\\textless "),
    (">", "\\textgreater "), ('"', "\\textquotedbl "),
)  # fmt: skip


def export_records(folders: Iterable[str | Path], path: str | Path) -> Path:
    """Write every number of some runs to a .csv or .parquet file, one row each, and return its
    path.

    The columns are those of ``RunData.to_pandas``, and ``folder``, the run folder. ``folders`` are
    run folders, or folders of run folders.

    Raises:
        ValueError: the suffix is none of these, or there is no run.
        ImportError: the file is Parquet and pyarrow is not installed.
    """
    import pandas as pd

    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"records are written as .csv or .parquet, got {path.name!r}.")
    found = [folder for given in folders for folder in run_folders(Path(given))]
    if not found:
        raise ValueError("there must be at least one run to export, got none.")
    frames = [
        read_run(folder).to_pandas().assign(folder=plain_text(str(folder))) for folder in found
    ]
    _write_frame(pd.concat(frames, ignore_index=True), path)
    return path


_FORMULA = re.compile(r"(?:^|[;\t\r\n])\s*[=+\-@＝＋－＠]")
"""A pattern for the beginning of a formula in a spreadsheet: a sign such as ``=`` at the start of a
cell, where a semicolon, a tab or a line break may also start a cell.
"""


def _no_formula(cell: Any) -> Any:
    """Return a cell's value, with an apostrophe before text that a spreadsheet would run as a
    formula.
    """
    if not isinstance(cell, str) or not _FORMULA.search(cell) or _is_number(cell):
        return cell
    return "'" + re.sub(r"[;\t\r\n]", " ", cell)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.ASCII | re.I) is not None


def _write_frame(frame: "pd.DataFrame", path: Path) -> None:
    if path.suffix == ".csv":
        texts = frame.rename(columns=_no_formula).map(_no_formula)
        write_private(path, texts.to_csv(index=False).encode())
    else:
        if importlib.util.find_spec("pyarrow") is None:
            raise ImportError(
                "Parquet needs pyarrow, which is not installed: "
                "pip install 'flwr-leakage[parquet]'."
            )
        write_private(path, frame.to_parquet(index=False))
