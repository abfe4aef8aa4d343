"""Write the report of a run: one HTML file that needs no other file and no network.

As reports are shared, no path in the page shows users' names or home folders.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flwr_leakage.measurements import ENDED_EARLY, defenses_told
from flwr_leakage.records import RunEvent
from flwr_leakage.report.advice import MAX_LINE, advise
from flwr_leakage.report.attempts import attempts, fates, tally
from flwr_leakage.report.figures import (
    corridors,
    round_figures,
    score_figures,
    story_figures,
)
from flwr_leakage.report.first_screen import heat_map, tiles, worst
from flwr_leakage.report.gallery import Gallery, make_gallery
from flwr_leakage.report.grades import SURENESS, grades_table, measures_table
from flwr_leakage.report.index import MAX_ROWS, RANKED, Index, Table, count, values
from flwr_leakage.report.large_clients import large_clients_section
from flwr_leakage.report.membership import membership_section, untested_told
from flwr_leakage.report.membership_curve import membership_curve
from flwr_leakage.report.nodes import with_short_names
from flwr_leakage.report.remedies import remedies, remedies_table
from flwr_leakage.report.story import (
    blind_guess,
    facts,
    flatten,
    planned_rounds,
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
from flwr_leakage.report.texts import FIRST_TOKENS, text_gallery
from flwr_leakage.report.verdict import judge, labels_untested, limits_told, not_covered
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.text import plain_text, plain_tree

MAX_CLIENTS = 100
MAX_ALERTS = 3
MAX_EVENTS = 200
PROVENANCE = ("start_time", "command", "commit", "dirty", "platform", "versions")


def write_report(
    run_folder: str | Path,
    output: str | Path | None = None,
    max_gallery: int = 1000,
) -> Path:
    """Write the report of a run folder into one self-contained HTML file.

    The report covers all that has been recorded so far: the run may be over, still going, or
    killed. The file holds private training images and is readable by its owner only.

    Args:
        run_folder: the folder to which a ``JsonlTracker`` wrote.
        output: the file to write; ``report.html`` in the run folder by default.
        max_gallery: the largest number of samples that the gallery shows.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: ``run_folder`` is no run folder.
    """
    if max_gallery < 0:
        raise ValueError(f"max_gallery must be at least 0, got {max_gallery}.")
    path = Path(output) if output is not None else Path(run_folder) / "report.html"
    html = render_report(read_run(run_folder), max_gallery)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A message may hold a lone surrogate, which UTF-8 cannot encode: a question mark replaces it.
    write_private(path, html.encode("utf-8", errors="replace"))
    return path


def render_report(run: RunData, max_gallery: int = 1000, live: str = "") -> str:
    """Return the HTML of a run's report, which is the same text for the same run.

    Args:
        run: the data of the run.
        max_gallery: the largest number of samples that the gallery shows.
        live: for a page that is served while the run goes on, the state that its script compares
            with ``state.json`` to notice a newer page; empty for a saved page, which makes no
            request.
    """
    run = as_shown(run)
    index, metadata = Index(run.records), run.metadata
    found, fate, asked = attempts(index), fates(index), remedies(index, metadata)
    done = rounds_of(index)
    verdict, advice = judge(index, run.events, metadata), advise(index, metadata, asked, run.events)
    alerts = verdict.head[:MAX_ALERTS]
    clients = clients_table(index, run.events, found, MAX_CLIENTS)
    others = unattacked_table(index, run.events, found, MAX_CLIENTS)
    rounds, costs = rounds_table(index, found), costs_table(index)
    gallery = make_gallery(run.images, found, max_gallery)
    texts = text_gallery(run.texts, found, index, max_gallery)
    any_grade = bool(tally(found)) and not texts
    members, large = membership_section(index), large_clients_section(index, metadata)
    story_chart, clients_chart = story_figures(index, found, asked)
    scripts = [_script(name) for name in ("script.js", "live.js")[: 2 if live else 1]]
    names = [metadata.get("run"), *(record.run for record in run.records[:1])]
    named = [name for name in names if isinstance(name, str) and name]
    return (
        environment("flwr_leakage.report")
        .get_template("report.html")
        .render(
            # The first screen.
            is_private=gallery.is_private or any(text.role == "original" for text in run.texts),
            sample=index.sample,
            name=plain_text([*named, run.folder.name][0], MAX_LINE),
            run=run,
            ended=_ended(run, done),
            level=verdict.level,
            advice=advice,
            commands=[step for step in advice.steps if step.commands],
            alerts=[_halved(text) for text in alerts],
            worst=worst(gallery, asked),
            first_tokens=FIRST_TOKENS,
            worst_text=texts.exhibits[0] if texts and texts.exhibits else None,
            tiles=tiles(index, metadata, found, members, large),
            map=heat_map(index, found, fate, done),
            limits=limits_told(index, fate, found, metadata),
            story_chart=story_chart,
            # The arguments below fill the chapters that the page shows folded.
            contents=_contents(
                index.sample.many,
                texts=texts is not None,
                gallery=bool(gallery.exhibits or gallery.without_reconstruction),
                large=large is not None,
                members=members is not None,
                rounds=bool(rounds.rows),
                grades=any_grade,
                clients=bool(clients.rows or others.rows),
                scores=bool(index.names("score")),
                costs=len(costs.rows) > 1,
            ),
            remedies=asked,
            remedied=remedies_table(asked),
            texts=texts,
            gallery=gallery,
            ranked=RANKED,
            blind_guess=blind_guess(index),
            story=sentences(index, metadata, fate, done),
            came_of_it=(verdict.sentence, *(t for t in verdict.details if t not in alerts)),
            large=large,
            members=members,
            members_curve=membership_curve(index),
            not_covered=not_covered(index.sample, members is not None),
            left_untested=(
                *([] if large and large.labels.rows else [labels_untested(index.sample)]),
                *([] if members else [untested_told(run.events)]),
                *_absent(index, [*clients.rows, *others.rows], costs, bool(texts), gallery),
            ),
            clients_chart=clients_chart,
            utility_charts=round_figures(index, "utility"),
            rounds=rounds,
            any_grade=any_grade,
            sureness=SURENESS,
            grades=grades_table(tally(found)),
            measures=measures_table(),
            clients=clients,
            unattacked=others,
            classes=classes_table(found),
            agreements=score_figures(index),
            score_charts=[*corridors(index, metadata), *round_figures(index, "score")],
            client_scores=client_scores_table(index, MAX_CLIENTS),
            error_bars=scores_table(index),
            score_notes=(*left_out_by_plan(index), *missing(index, "score"), *constants(index)),
            troubles=events_table([e for e in run.events if e.level != "info"], MAX_EVENTS),
            remarks=events_table([e for e in run.events if e.level == "info"], MAX_EVENTS),
            costs=costs,
            attacks=attacks_table(index, found),
            facts=facts(metadata),
            rounds_done=done,
            rounds_planned=planned_rounds(metadata),
            metadata={key: metadata.get(key) for key in PROVENANCE},
            config=flatten(metadata["config"]) if metadata.get("config") else [],
            scripts=[Markup(script) for script in scripts],
            hashes=[base64.b64encode(sha256(each.encode()).digest()).decode() for each in scripts],
            live=live,
        )
    )


CONTENTS = {
    "advice": "The answer at length",
    "texts": "Texts",
    "gallery": "Images",
    "tested": "What was tested",
    "large": "Clients of many samples",
    "members": "Was this record used?",
    "uncovered": "What is not covered",
    "rounds": "Round by round",
    "grades": "The grades",
    "clients": "Clients and classes",
    "scores": "Risk scores",
    "events": "Events",
    "costs": "Costs",
    "reproduce": "Appendix",
}
"""The parts of the page that are folded: their titles by anchor, in the page's order."""


def _contents(noun: str, **has: bool) -> dict[str, str]:
    """Return the titles of the page's folded parts by anchor.

    ``noun`` is the plural for the samples. ``has`` tells, by the anchor of an optional part,
    whether the page has it.
    """
    titles = {**CONTENTS, "large": f"Clients of many {noun}"}
    return {anchor: title for anchor, title in titles.items() if has.get(anchor, True)}


def _script(name: str) -> str:
    return (resources.files("flwr_leakage.report") / "templates" / name).read_text("utf-8")


def environment(*packages: str) -> Environment:
    """Return the Jinja environment, with its filters, for the templates in these packages."""
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["count"] = count
    found.filters["moment"] = _moment
    found.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    found.filters["homeless"] = homeless
    found.filters["plain"] = plain_text
    found.globals["max_rows"] = MAX_ROWS
    return found


def rounds_of(index: Index) -> int:
    """Return the number of the last round that has a record; 0 if there is none."""
    return max(index.rounds("metric", "score", "attack", "utility", "cost"), default=0)


def unfinished(run: RunData, done: int) -> str:
    """Return a sentence if a run is not over, or was ended early; else empty.

    ``done`` is the last round with a record.
    """
    planned = planned_rounds(run.metadata)
    of = f" of {planned}" if planned else ""
    if not run.closed:
        where = f" in or after round {done}{of}" if planned else ""
        return f"Unfinished run. It still goes on, or it was stopped{where}."
    if any(event.message.startswith(ENDED_EARLY) for event in run.events):
        return f"Unfinished run. It was ended early, in or after round {done}{of} (see Events)."
    if planned and done < planned:
        return f"Unfinished run. It ended after round {done}{of}."
    return ""


def _ended(run: RunData, done: int) -> str:
    """Return sentences on whether the run is over; ``done`` is the last round with a record."""
    last = f" Last written {_moment(run.last_write)}." if run.last_write else ""
    if open_ := unfinished(run, done):
        return open_ + last
    return f"The run ended after {count(done, 'round')}."


def _halved(text: str) -> tuple[str, str]:
    """Return the first sentence of a text, up to a colon or full stop, and the rest.

    A first sentence of more than 200 characters (``MAX_LINE``) is cut, and the second part is then
    the whole text.
    """
    first, end, rest = re.split(r"([:.](?= )|$)", text, maxsplit=1)
    if len(first) > MAX_LINE:
        return plain_text(first, MAX_LINE), text
    return first + end.replace(":", "."), rest.strip()


def conclusion(run_folder: str | Path) -> str:
    """Return lines for the terminal: the verdict, the advice on going on, and the report's path.

    If the run cannot say whether training may go on, further lines say what else to run.

    Args:
        run_folder: the folder of a run whose report was written.

    Raises:
        FileNotFoundError: ``run_folder`` is no run folder.
    """
    run = as_shown(read_run(run_folder))
    index = Index(run.records)
    verdict = judge(index, run.events, run.metadata)
    advice = advise(index, run.metadata, remedies(index, run.metadata), run.events)
    report = (Path(run_folder) / "report.html").resolve()
    told = f"{verdict.sentence}\nMay training go on? {advice.headline}"
    return "\n".join((told, *advice.do, f"Report: {report}"))


def _moment(written: object) -> str:
    """Return an ISO 8601 time in a form for people; any other value unchanged."""
    try:
        return f"{datetime.fromisoformat(str(written)):%Y-%m-%d %H:%M:%S %Z}".strip()
    except ValueError:
        return str(written)


def _absent(
    index: Index, clients: Sequence[object], costs: Table, has_texts: bool, gallery: Gallery
) -> tuple[str, ...]:
    """Return a sentence for each section of the page that is left out, as it has nothing to show.

    ``clients`` are the rows of the tables of clients, and ``has_texts`` tells whether texts are
    shown.
    """
    unmeasured = "No attack was measured and no utility was recorded."
    if values(index.series("attack", "objective")):
        unmeasured = (
            "Updates were attacked, and nothing measures the results, as no original is known "
            "here. No utility was recorded."
        )
    absent = {
        unmeasured: index.rounds("metric", "utility"),
        "No reconstruction was recorded.": (
            has_texts or gallery.exhibits or gallery.without_reconstruction
        ),
        "Nothing was recorded of any client.": clients,
        "No score was computed.": index.names("score"),
        "No cost was recorded.": costs.rows[1:],
    }
    return tuple(sentence for sentence, content in absent.items() if not content)


def as_shown(run: RunData) -> RunData:
    """Return the run as pages show it.

    Users' home folders are written as ``~``, and :func:`with_short_names` shortens clients' ids. A
    run without a config gets the defenses that its clients say they use.
    """
    return with_short_names(
        replace(
            run,
            metadata=plain_tree({**_defense_said(run.events), **run.metadata}, homeless),
            records=tuple(
                replace(record, note=homeless(record.note)) if record.note else record
                for record in run.records
            ),
            events=tuple(replace(event, message=homeless(event.message)) for event in run.events),
            problems=tuple(map(homeless, run.problems)),
        )
    )


def _defense_said(events: Sequence[RunEvent]) -> dict[str, str]:
    """Return the entry ``defense`` for a run's metadata, with the defenses that clients say they
    use.

    The mapping is empty if no client names a defense.
    """
    names = defenses_told(event.message for event in events)
    return {"defense": f"{' and '.join(names[:3])} (as clients say)"} if names else {}


# As a run may come from another machine, users' home folders are recognised by their parent folder.
_HOMES = (
    r"[^\s\"'=:;,()]*/(?:home|Users)/[^/\s\"'=:;,()]+"
    r"|(?<![\w.])/root(?![\w.-])"
    r"|\b[A-Za-z]:\\+Users\\+[^\\\s\"'=:;,()]+"
)


@lru_cache(maxsize=4096)
def homeless(text: str) -> str:
    r"""Return a text with every user's home folder written as ``~``.

    Example:
        >>> homeless("put a.pth into /home/jo/.cache/torch or C:\\Users\\jo\\torch")
        'put a.pth into ~/.cache/torch or ~\\torch'
    """
    return _pattern(str(Path.home())).sub("~", text)


@lru_cache(maxsize=8)
def _pattern(home: str) -> "re.Pattern[str]":
    here = rf"{re.escape(home)}(?![\w.-])|" if len(home) > 1 else ""
    return re.compile(here + _HOMES)
