"""Write the page that a person reads: one file that needs nothing but itself."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flwr_leakage.report import charts, score_tables, tables
from flwr_leakage.report.agreement import Agreement, agreements
from flwr_leakage.report.attempts import attempts, fates
from flwr_leakage.report.corridor import corridors
from flwr_leakage.report.gallery import Gallery, make_gallery
from flwr_leakage.report.header import facts, flatten, planned_rounds
from flwr_leakage.report.index import (
    Index,
    Table,
    by_round,
    count,
    heading,
    is_constant,
    label,
    median,
    number,
    unit_of,
    values,
)
from flwr_leakage.report.remedies import Remedy, remedies
from flwr_leakage.report.story import sentences
from flwr_leakage.report.verdict import NOT_COVERED, judge
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import write_private

MAX_CLIENTS = 100
MAX_EVENTS = 200
PROVENANCE = ("start_time", "command", "commit", "dirty", "platform", "versions")


@dataclass(frozen=True)
class Chart:
    """A chart of a quantity over the rounds.

    Attributes:
        title: the quantity with its unit.
        caption: how to read it.
        svg: the drawing, as inline SVG.
    """

    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class ScoreChart:
    """A scatter plot of a risk score and what the attack reached on the same samples.

    Attributes:
        title: the score.
        caption: what the axes are.
        figures: number of pairs, Spearman's ρ with its interval and p-value.
        reading: what ρ means, in words.
        svg: the drawing, or ``None`` where no sample has both numbers.
    """

    title: str
    caption: str
    figures: str
    reading: str
    svg: Markup | None


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
    script = (resources.files("flwr_leakage.report") / "templates" / "filter.js").read_text("utf-8")
    found, fate = attempts(index), fates(index)
    asked = remedies(index, run.metadata)
    done = max(index.rounds("metric", "score", "attack", "utility", "cost"), default=0)
    clients = tables.clients_table(index, run.events, found, MAX_CLIENTS)
    costs, gallery = tables.costs_table(index), make_gallery(run.images, found, max_gallery)
    blind = median(values(index.series("metric", "blind_psnr")))
    names = [run.metadata.get("run"), *(record.run for record in run.records[:1])]
    return environment.get_template("report.html").render(
        name=next((name for name in names if isinstance(name, str) and name), run.folder.name),
        run=run,
        metadata={key: run.metadata.get(key) for key in PROVENANCE},
        config=flatten(run.metadata["config"]) if run.metadata.get("config") else [],
        facts=facts(run.metadata),
        story=sentences(index, run.metadata, fate, done),
        verdict=judge(index, run.events, run.metadata),
        remedies=asked,
        not_covered=(*NOT_COVERED, *_absent(index, clients, costs, gallery)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        rounds_done=done,
        rounds_planned=planned_rounds(run.metadata),
        story_chart=_story_chart(index, asked),
        score_charts=[*corridors(index, run.metadata), *_charts(index, "score")],
        utility_charts=_charts(index, "utility"),
        score_notes=(
            *score_tables.left_out_by_plan(index),
            *tables.missing(index, "score"),
            *_constant_scores(index),
        ),
        rounds=tables.rounds_table(index, found),
        attacks=tables.attacks_table(index),
        sureness=score_tables.scores_table(index),
        gallery=gallery,
        agreements=[
            _score_chart(i, entry, blind)
            for i, entry in enumerate(agreements(index))
            if not is_constant(index.series("score", entry.score))
        ],
        clients=clients,
        client_scores=score_tables.client_scores_table(index, MAX_CLIENTS),
        classes=tables.classes_table(found),
        troubles=tables.events_table([e for e in run.events if e.level != "info"], MAX_EVENTS),
        remarks=tables.events_table([e for e in run.events if e.level == "info"], MAX_EVENTS),
        costs=costs,
        any_grade=any(attempt.grade for attempt in found),
        any_score=bool(index.names("score")),
    )


def _moment(written: object) -> str:
    """Write an ISO 8601 time for people; anything else as it is."""
    try:
        return f"{datetime.fromisoformat(str(written)):%Y-%m-%d %H:%M:%S %Z}".strip()
    except ValueError:
        return str(written)


def _constant_scores(index: Index) -> tuple[str, ...]:
    """Name the scores that are one number throughout: a chart of them would show nothing."""
    names_by_value: dict[str, list[str]] = {}
    for name in index.names("score"):
        series = index.series("score", name)
        if is_constant(series):
            names_by_value.setdefault(number(values(series)[0]), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {value} for every sample, hence without a chart."
        for value, names in names_by_value.items()
    )


def _absent(index: Index, clients: Table, costs: Table, gallery: Gallery) -> tuple[str, ...]:
    """Sentences in place of the sections that would be empty."""
    absent = {
        "No attack was measured and no utility was recorded.": index.rounds("metric", "utility"),
        "No reconstruction was recorded.": gallery.exhibits or gallery.without_reconstruction,
        "Nothing was recorded of any client.": clients.rows,
        "No score was computed.": index.names("score"),
        "No cost was recorded.": costs.rows[1:],
    }
    return tuple(sentence for sentence, content in absent.items() if not content)


def _dots(groups: dict[int, list[float]]) -> str:
    most = max(map(len, groups.values()))
    if most == 1:
        return ""
    if most > charts.MAX_DOTS_A_ROUND:
        return f" Dots: {charts.MAX_DOTS_A_ROUND} of up to {most:,} values a round, even by rank."
    return " Dots: every value."


def _story_chart(index: Index, asked: Sequence[Remedy]) -> Chart | None:
    series = index.series("metric", "psnr")
    pooled = by_round(series)
    if not pooled:
        return None
    leakage: dict[int, dict[int, list[float]]] = {}
    for (server_round, client, _), record in series.items():
        if record.value is not None:
            leakage.setdefault(client, {}).setdefault(server_round, []).append(record.value)
    accuracy = by_round(index.series("utility", "test_accuracy"))
    blind = by_round(index.series("metric", "blind_psnr"))
    told = [remedy for remedy in asked if remedy.psnr][: charts.MAX_LINES]
    what_ifs = {remedy.name: remedy.psnr for remedy in told}
    description = f"PSNR of the reconstructions by round: {_tell(pooled)}"
    svg = charts.story_chart(accuracy, leakage, blind, what_ifs, "story", description)
    caption = (
        "how near the attack comes to the private images; each dot is one image in one round, "
        "higher is nearer, hence a worse leak."
    )
    if accuracy:
        caption = f"Above: how good the trained model is. Below: {caption}"
    else:
        caption = f"{caption[0].upper()}{caption[1:]}"
    if blind:
        caption += " Near the dotted line the attack is as good as no attack."
    if told:
        names = " and ".join(remedy.name for remedy in told)
        left = f" ({len(asked) - len(told)} more below)" if len(asked) > len(told) else ""
        caption += f" Dashed: the same updates under {names}{left}."
    title = "Accuracy and leakage" if accuracy else "Leakage"
    return Chart(f"{title}, round by round", caption + _dots(pooled), svg)


def _charts(index: Index, kind: str) -> list[Chart]:
    found = []
    told = bool(values(index.series("metric", "psnr")))  # by the story chart
    for i, name in enumerate(index.names(kind)):
        series = index.series(kind, name)
        groups, unit = by_round(series), unit_of(series)
        if name.endswith("accuracy"):
            groups, unit = {r: [100 * v for v in held] for r, held in groups.items()}, "%"
        if (
            not groups
            or (kind == "score" and is_constant(series))
            or (name == "test_accuracy" and told)
        ):
            continue
        description = f"{label(name)} by round: {_tell(groups)}"
        svg = charts.rounds_chart(groups, f"{kind}{i}", description, unit)
        direction = next(iter(series.values())).direction
        caption = f"{_claim(direction)}" if direction else ""
        found.append(Chart(heading(name, unit), caption + _dots(groups), svg))
    return found


def _claim(direction: str) -> str:
    """What a score says of itself is its paper's claim; this run may bear it out or not."""
    return f"Its paper claims: {direction}."


def _tell(groups: dict[int, list[float]]) -> str:
    """The first and last median, for readers who do not see the chart."""
    first, last = min(groups), max(groups)
    ends = [f"median {number(median(groups[r]))} in round {r}" for r in (first, last)]
    return f"{', '.join(dict.fromkeys(ends))}."


def _score_chart(i: int, entry: Agreement, blind: float | None) -> ScoreChart:
    figures = [f"n\u00a0=\u00a0{len(entry.pairs)}"]
    if entry.rho is not None and entry.p_value is not None:
        figures.insert(0, f"Spearman ρ\u00a0=\u00a0{_rho(entry.rho)}")
        if entry.interval is not None:
            low, high = entry.interval
            figures.append(f"95 % interval {_rho(low)} to {_rho(high)}")
        p_value = (
            "p\u00a0<\u00a00.001" if entry.p_value < 0.001 else f"p\u00a0=\u00a0{entry.p_value:.3f}"
        )
        figures.append(p_value)
    if entry.within_rounds is not None:
        figures.append(f"within rounds ρ = {_rho(entry.within_rounds)} (median)")
    outcome = heading(entry.outcome, entry.unit)
    svg = None
    if entry.pairs:
        level = blind if entry.outcome == "psnr" else None
        description = f"{label(entry.score)} against {outcome}: {', '.join(figures)}."
        svg = charts.scatter_chart(entry.pairs, f"scatter{i}", description, outcome, level)
    caption = f"Right: {label(entry.score)}. Up: {outcome}."
    if len(entry.pairs) > charts.MAX_DOTS:
        caption += f" Only some of the {len(entry.pairs):,} dots are drawn."
    return ScoreChart(label(entry.score), caption, " · ".join(figures), entry.reading, svg)


def _rho(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
