"""The charts of the page with their titles and captions."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from markupsafe import Markup

from flwr_leakage.report import charts, drawing
from flwr_leakage.report.agreement import Agreement
from flwr_leakage.report.attempts import Attempt, grouped_by_client, most_at_risk_first
from flwr_leakage.report.budget import ended
from flwr_leakage.report.grades import EXACT_DB, PARTLY_DB, RECOGNISABLE_DB
from flwr_leakage.report.index import (
    Index,
    by_round,
    heading,
    is_constant,
    label,
    median,
    number,
    unit_of,
    values,
)
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.story_chart import MAX_LINES, MAX_PANELS, Dot, Panel, story_chart


@dataclass(frozen=True)
class Chart:
    """A chart of a quantity over the rounds.

    Attributes:
        title: the quantity with its unit.
        caption: how to read it.
        svg: the drawing, as inline SVG.
        more: what else to know for reading it; folded.
    """

    title: str
    caption: str
    svg: Markup
    more: str = ""


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


def _dots(groups: dict[int, list[float]]) -> str:
    most = max(map(len, groups.values()))
    if most == 1:
        return ""
    if most > drawing.MAX_DOTS_A_ROUND:
        return f" Dots: {drawing.MAX_DOTS_A_ROUND} of up to {most:,} values a round, even by rank."
    return " Dots: every value."


def story_figure(index: Index, found: Sequence[Attempt], asked: Sequence[Remedy]) -> Chart | None:
    """Accuracy and leakage round by round, by client; ``None`` where nothing was measured."""
    known = [attempt for attempt in found if attempt.psnr is not None]
    if not known:
        return None
    told = [remedy for remedy in asked if remedy.under][:MAX_LINES]
    by_client = grouped_by_client(known)
    clients: list[int | None] = [*most_at_risk_first(by_client)]
    if len(clients) > MAX_PANELS:
        clients = [None]
    panels = [_panel(client, known, told, ended(index, found)) for client in clients]
    accuracy = by_round(index.series("utility", "test_accuracy"))
    description = " ".join(
        ["PSNR of the reconstructions by round."]
        + [f"{panel.title.capitalize()}: {_tell(_psnr_by_round(panel))}" for panel in panels]
    )
    svg = story_chart(accuracy, panels, "story", description)
    title = "Accuracy and leakage" if accuracy else "Leakage"
    caption = _story_caption(panels, told, bool(accuracy))
    more = _story_details(panels, told, len(asked))
    return Chart(f"{title}, round by round", caption, svg, more)


def _panel(
    client: int | None,
    known: Sequence[Attempt],
    told: Sequence[Remedy],
    stopped: Set[tuple[int, int]],
) -> Panel:
    def of(found: Iterable[Attempt]) -> list[Attempt]:
        return [a for a in found if client is None or a.key[1] == client]

    dots: dict[int, list[Dot]] = {}
    blind: dict[int, list[float]] = {}
    for attempt in of(known):
        assert attempt.psnr is not None
        dot = Dot(attempt.psnr, attempt.grade or "", attempt.key[:2] in stopped)
        dots.setdefault(attempt.key[0], []).append(dot)
        if attempt.blind is not None:
            blind.setdefault(attempt.key[0], []).append(attempt.blind)
    under: dict[str, dict[int, list[float]]] = {}
    for remedy in told:
        for attempt in of(remedy.under):
            if attempt.psnr is not None:
                rounds = under.setdefault(remedy.name, {})
                rounds.setdefault(attempt.key[0], []).append(attempt.psnr)
    return Panel(client, dots, under, blind)


def _psnr_by_round(panel: Panel) -> dict[int, list[float]]:
    return {r: [dot.psnr for dot in dots] for r, dots in panel.dots.items()}


def _story_caption(panels: Sequence[Panel], told: Sequence[Remedy], with_accuracy: bool) -> str:
    """What must be known to read the chart; at most four lines."""
    text = "Each dot is one image in one round; the higher, the nearer the attack came to it."
    if with_accuracy:
        text = f"On top: how good the trained model is. Below: {text[0].lower()}{text[1:]}"
    if any(dot.ended for panel in panels for dots in panel.dots.values() for dot in dots):
        text += " Hollow: the time limit cut the attack off, so that a fall is no sign of safety."
    if any(panel.blind for panel in panels):
        text += " Dotted: a guess without any update."
    if told:
        text += f" Dashed: the same updates under {' and '.join(remedy.name for remedy in told)}."
    return text


def _story_details(panels: Sequence[Panel], told: Sequence[Remedy], asked: int) -> str:
    """What else is to be known of the chart; folded."""
    text = "Height is PSNR in decibels."
    if len(panels) > 1:
        text += " Each client, most at risk first, has a scale of its own."
    if any(value >= EXACT_DB for panel in panels for value in panel.values):
        text += (
            " Decibels are drawn up to 48.1: whatever is above is on average off by less than one "
            "of 255 grey levels, and lies in the band “exact”, however many decibels it has."
        )
    if any(panel.blind for panel in panels):
        text += (
            f" The bands are the grades that PSNR alone gives: {PARTLY_DB:g} dB and "
            f"{RECOGNISABLE_DB:g} dB above the dotted line. The mark of a dot is its own grade: "
            f"likeness of structure (SSIM) can raise it, so that a dot of a low band may show "
            f"something."
        )
    if told:
        text += f" Not drawn: {asked - len(told)} more defenses." if asked > len(told) else ""
        stopped = sum(sum(remedy.ended.values()) for remedy in told)
        whole = sum(len(remedy.ended) for remedy in told)
        if stopped:
            text += f" The time limit cut off {stopped} of {whole} attacks under a defense."
    most = max(len(dots) for panel in panels for dots in panel.dots.values())
    if most > drawing.MAX_DOTS_A_ROUND:
        text += _dots(_psnr_by_round(max(panels, key=lambda p: max(map(len, p.dots.values())))))
    return text


def round_figures(index: Index, kind: str) -> list[Chart]:
    """A chart over the rounds of every quantity of a kind that changes."""
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


def score_figure(i: int, entry: Agreement, blind: float | None) -> ScoreChart:
    """A risk score against the outcome; ``blind`` is the PSNR of the blind guess."""
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
    if len(entry.pairs) > drawing.MAX_DOTS:
        caption += f" Only some of the {len(entry.pairs):,} dots are drawn."
    return ScoreChart(label(entry.score), caption, " · ".join(figures), entry.reading, svg)


def _rho(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
