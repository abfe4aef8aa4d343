"""Write the page that a person reads: one file that needs nothing but itself.

A page is shared: no path in it says who ran the audit, or where that person's files lie.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, fates, tally
from flwr_leakage.report.figures import (
    agreement_told,
    agreements,
    corridors,
    round_figures,
    score_figure,
    story_figure,
)
from flwr_leakage.report.gallery import Gallery, make_gallery
from flwr_leakage.report.grades import SURENESS, grades_table, measures_table
from flwr_leakage.report.index import RANKED, Index, Table, count, median, values
from flwr_leakage.report.large_clients import large_clients_section
from flwr_leakage.report.membership import UNTESTED, membership_section
from flwr_leakage.report.remedies import remedies, remedies_table
from flwr_leakage.report.story import (
    blind_guess,
    facts,
    flatten,
    planned_rounds,
    psnr_told,
    sentences,
)
from flwr_leakage.report.tables import (
    attacks_table,
    classes_table,
    client_scores_table,
    clients_table,
    constants,
    costs_table,
    events_table,
    left_out_by_plan,
    missing,
    rounds_table,
    scores_table,
    unattacked_table,
)
from flwr_leakage.report.texts import in_words_of_texts, with_texts
from flwr_leakage.report.verdict import LABELS, NOT_COVERED, judge, limits_told
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.text import plain_text

MAX_CLIENTS = 100
MAX_EVENTS = 200
PROVENANCE = ("start_time", "command", "commit", "dirty", "platform", "versions")


def write_report(
    run_folder: str | Path,
    output: str | Path | None = None,
    max_gallery: int = 1000,
) -> Path:
    """Write the report of a run folder into one self-contained HTML file.

    The report is of what has been recorded so far: the run may be over, still going, or killed.
    The file holds private training images and is readable by its owner only.

    Args:
        run_folder: where a ``JsonlTracker`` wrote.
        output: the file to write; ``report.html`` in the run folder by default.
        max_gallery: how many samples the gallery shows at most.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: if ``run_folder`` is no run folder.
    """
    if max_gallery < 0:
        raise ValueError(f"max_gallery must be at least 0, got {max_gallery}.")
    path = Path(output) if output is not None else Path(run_folder) / "report.html"
    html = render_report(read_run(run_folder), max_gallery)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A message may hold a lone surrogate, which UTF-8 cannot write.
    write_private(path, html.encode("utf-8", errors="replace"))
    return path


def render_report(run: RunData, max_gallery: int = 1000) -> str:
    """Return the page's HTML; the same run gives the same text."""
    run = without_home(run)
    index = Index(run.records)
    environment = Environment(
        loader=PackageLoader("flwr_leakage.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = count
    environment.filters["moment"] = _moment
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    script = (resources.files("flwr_leakage.report") / "templates" / "filter.js").read_text("utf-8")
    found, fate = attempts(index), fates(index)
    asked = remedies(index, run.metadata)
    done = max(index.rounds("metric", "score", "attack", "utility", "cost"), default=0)
    clients = clients_table(index, run.events, found, MAX_CLIENTS)
    others = unattacked_table(index, run.events, found, MAX_CLIENTS)
    costs, gallery = costs_table(index), make_gallery(run.images, found, max_gallery)
    blind = median(values(index.series("metric", "blind_psnr")))
    agreed = agreements(index)
    names = [run.metadata.get("run"), *(record.run for record in run.records[:1])]
    members, large = membership_section(index), large_clients_section(index)
    named = [name for name in names if isinstance(name, str) and name]
    page = environment.get_template("report.html").render(
        name=[*named, plain_text(run.folder.name)][0],
        run=run,
        metadata={key: run.metadata.get(key) for key in PROVENANCE},
        config=flatten(run.metadata["config"]) if run.metadata.get("config") else [],
        facts=facts(run.metadata),
        story=sentences(index, run.metadata, fate, done),
        verdict=judge(index, run.events, run.metadata),
        advice=advise(index, run.metadata, asked, run.events),
        remedies=asked,
        remedied=remedies_table(asked),
        grades=grades_table(tally(found)),
        measures=measures_table(),
        sureness=SURENESS,
        limits=limits_told(index, fate, found, run.metadata),
        psnr_told=psnr_told(index),
        ranked=RANKED,
        blind_guess=blind_guess(index),
        members=members,
        large=large,
        not_covered=(
            *(each for each in NOT_COVERED if not (large and large.labels.rows and each == LABELS)),
            *([] if members else [UNTESTED]),
            *_absent(index, [*clients.rows, *others.rows], costs, gallery),
        ),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        rounds_done=done,
        rounds_planned=planned_rounds(run.metadata),
        story_chart=story_figure(index, found, asked),
        score_charts=[*corridors(index, run.metadata), *round_figures(index, "score")],
        utility_charts=round_figures(index, "utility"),
        score_notes=(
            *left_out_by_plan(index),
            *missing(index, "score"),
            *constants(index),
        ),
        rounds=rounds_table(index, found),
        attacks=attacks_table(index, found),
        error_bars=scores_table(index),
        gallery=gallery,
        agreements=[score_figure(i, entry, blind) for i, entry in enumerate(agreed)],
        agreement=agreement_told(agreed) if agreed else "",
        any_agrees=any(entry.holds for entry in agreed),
        clients=clients,
        unattacked=others,
        client_scores=client_scores_table(index, MAX_CLIENTS),
        classes=classes_table(found),
        troubles=events_table([e for e in run.events if e.level != "info"], MAX_EVENTS),
        remarks=events_table([e for e in run.events if e.level == "info"], MAX_EVENTS),
        costs=costs,
        any_grade=any(attempt.grade for attempt in found) and not run.texts,
        any_score=bool(index.names("score")),
    )
    return with_texts(page, environment, run.texts, found, index, max_gallery)


def conclusion(run_folder: str | Path) -> str:
    """Return the verdict, whether training may go on, what to do if the run cannot say, the report.

    Args:
        run_folder: of a run whose report was written.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    run = read_run(run_folder)
    index = Index(run.records)
    verdict = judge(index, run.events, run.metadata)
    advice = advise(index, run.metadata, remedies(index, run.metadata), run.events)
    report = (Path(run_folder) / "report.html").resolve()
    told = f"{verdict.sentence}\nMay training go on? {advice.answer}"
    if verdict.sentence.startswith(advice.answer):
        told = f"May training go on? {verdict.sentence}"
    if run.texts:
        told, advised = in_words_of_texts(told), tuple(map(in_words_of_texts, advice.do))
        return "\n".join((told, *advised, f"Report: {report}"))
    return "\n".join((told, *advice.do, f"Report: {report}"))


def _moment(written: object) -> str:
    """Write an ISO 8601 time for people; anything else as it is."""
    try:
        return f"{datetime.fromisoformat(str(written)):%Y-%m-%d %H:%M:%S %Z}".strip()
    except ValueError:
        return str(written)


def _absent(
    index: Index, clients: Sequence[object], costs: Table, gallery: Gallery
) -> tuple[str, ...]:
    """Return sentences in place of the sections that would be empty."""
    absent = {
        "No attack was measured and no utility was recorded.": index.rounds("metric", "utility"),
        "No reconstruction was recorded.": gallery.exhibits or gallery.without_reconstruction,
        "Nothing was recorded of any client.": clients,
        "No score was computed.": index.names("score"),
        "No cost was recorded.": costs.rows[1:],
    }
    return tuple(sentence for sentence, content in absent.items() if not content)


def without_home(run: RunData) -> RunData:
    """Return the run with ``~`` for every user's home folder, in each text that it holds."""
    return replace(
        run,
        metadata=_cleaned(run.metadata),
        records=tuple(
            replace(record, note=homeless(record.note)) if record.note else record
            for record in run.records
        ),
        events=tuple(replace(event, message=homeless(event.message)) for event in run.events),
        problems=tuple(map(homeless, run.problems)),
    )


def _cleaned(node: Any) -> Any:
    if isinstance(node, str):
        return homeless(node)
    if isinstance(node, Mapping):
        return {key: _cleaned(value) for key, value in node.items()}
    return [_cleaned(value) for value in node] if isinstance(node, list) else node


# The run may have been made on another machine, so its user's folder is told by where it lies.
_HOMES = (
    r"[^\s\"'=:;,()]*/(?:home|Users)/[^/\s\"'=:;,()]+"
    r"|(?<![\w.])/root(?![\w.-])"
    r"|\b[A-Za-z]:\\+Users\\+[^\\\s\"'=:;,()]+"
)


@lru_cache(maxsize=4096)
def homeless(text: str) -> str:
    r"""Write every user's home folder in a text as ``~``.

    Example:
        >>> homeless("put a.pth into /home/jo/.cache/torch or C:\\Users\\jo\\torch")
        'put a.pth into ~/.cache/torch or ~\\torch'
    """
    return _pattern(str(Path.home())).sub("~", text)


@lru_cache(maxsize=8)
def _pattern(home: str) -> "re.Pattern[str]":
    here = rf"{re.escape(home)}(?![\w.-])|" if len(home) > 1 else ""
    return re.compile(here + _HOMES)
