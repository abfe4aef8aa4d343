"""Write a page that compares several runs: a table, a plot of accuracy over leakage, and links."""

import os
import re
from pathlib import Path

import matplotlib
from markupsafe import Markup

from flwr_leakage.comparison.compare import Comparison
from flwr_leakage.comparison.frontier import frontier
from flwr_leakage.comparison.outcome import MEASURES
from flwr_leakage.comparison.price import prices
from flwr_leakage.report.drawing import STYLE, inline
from flwr_leakage.report.index import Table
from flwr_leakage.report.page import environment, homeless
from flwr_leakage.tracking.jsonl import write_private


def write_comparison(comparison: Comparison, path: str | Path, link_reports: bool = False) -> Path:
    """Write a comparison as one HTML page, which loads no other file.

    The page holds no private image, and is readable by its owner only.

    Args:
        comparison: the runs to show.
        path: the file to write.
        link_reports: whether the page links to the runs' reports by relative paths; set it only for
            reports that were written here, as a stranger's report may be any page.

    Returns:
        The path of the file.
    """
    path = Path(path)
    headings, rows = comparison.cells()
    shown = [measure for measure in MEASURES if measure.name in comparison.measures]
    try:
        picture, narrow = (_drawn(comparison, narrow=n) for n in (False, True))
        missing = ""
    except ValueError as error:
        picture, narrow, missing = Markup(), Markup(), str(error)
    pages = environment("flwr_leakage.comparison", "flwr_leakage.report")
    html = pages.get_template("comparison.html").render(
        num_runs=len(comparison.runs),
        groups=comparison.groups,
        settings=comparison.settings,
        values=None if comparison.labels == comparison.settings else _values(comparison),
        table=Table(
            tuple(headings),
            tuple(
                tuple(_short(homeless(text), row[len(comparison.labels)]) for text in row)
                for row in rows
            ),
        ),
        measures=shown,
        prices=prices(comparison),
        problems=comparison.problems,
        picture=picture,
        narrow=narrow,
        missing=missing,
        link=lambda run: _link(run.folder, path) if link_reports else "",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A setting may hold a lone surrogate, which UTF-8 cannot encode: a question mark replaces it.
    write_private(path, html.encode("utf-8", errors="replace"))
    return path


WIDE = 11.0, 4.4
"""The width and height, in inches, of a picture as wide as the page."""


def _short(text: str, runs: str) -> str:
    """Return a cell's text without its ``n = …``, if n is ``runs``, the number in another column.

    Non-breaking spaces keep a text in brackets on one line.

    Example:
        >>> _short("67% (0% to 100%, n = 3)", "3").replace(" ", "~")
        '67% (0%~to~100%)'
        >>> _short("2.0 (n = 2)", "2")
        '2.0'
    """
    text = text.replace(f", n = {runs})", ")").replace(f" (n = {runs})", "")
    return re.sub(r"\(.*?\)", lambda found: found[0].replace(" ", "\u00a0"), text)


def _values(comparison: Comparison) -> Table:
    """Return a table of the settings in which runs differ: a row for each setting, a column for
    each group of runs, and in each cell the setting's value in that group.
    """
    groups = comparison.groups
    rows = [(key, *(group.settings[key] for group in groups)) for key in comparison.settings]
    return Table(
        ("setting", *(homeless(group.name) for group in groups)),
        tuple(tuple(homeless(text) for text in row) for row in rows),
    )


def _drawn(comparison: Comparison, narrow: bool) -> Markup:
    """Return the plot of accuracy over leakage as SVG in the page's colours, for a phone if
    ``narrow``.

    The legend names groups by the table's row numbers.

    Raises:
        ValueError: no group has both an accuracy and a leakage.
    """
    with matplotlib.rc_context({**STYLE, "legend.frameon": False}):
        figure = frontier(comparison, narrow=narrow, numbered=True)
        figure.patch.set_alpha(0)
        if not narrow:
            figure.set_size_inches(*WIDE)  # this keeps its letters no larger than the page's
        (axes,) = figure.axes
        axes.patch.set_alpha(0)
        described = "Test accuracy over the PSNR of the worst leak, a point for each setting."
        return inline(figure, "narrow" if narrow else "wide", described)


def _link(folder: Path, page: Path) -> str:
    """Return the path of the report in ``folder``, relative to the folder of the file ``page``.

    The path is empty if there is no report.
    """
    report = folder / "report.html"
    return os.path.relpath(report, page.parent) if report.is_file() else ""
