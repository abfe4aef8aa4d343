"""Make the report's charts, with their titles and captions.

An attack shows that an update reveals at least so much, and a bound that it reveals at most so
much. Neither alone says how safe an update is: an attack may be weak, and a bound may be loose or
not meant for this attacker.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flwr_leakage.correlation import RankAgreement, rank_agreement
from flwr_leakage.report.attempts import (
    SURE,
    Attempt,
    ended,
    grouped_by_client,
    most_at_risk_first,
)
from flwr_leakage.report.drawing import (
    MAX_DOTS,
    MAX_DOTS_A_ROUND,
    MAX_LINES,
    MAX_PANELS,
    Dot,
    Panel,
    corridor_chart,
    rounds_chart,
    scatter_chart,
    story_chart,
)
from flwr_leakage.report.grades import EXACT_DB, PARTLY_DB, RECOGNISABLE_DB
from flwr_leakage.report.index import (
    Index,
    Key,
    by_round,
    count,
    decibel,
    grouped,
    heading,
    is_constant,
    known,
    label,
    median,
    number,
    unit_of,
    values,
)
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.samples import Sample
from flwr_leakage.report.story import psnr_told


@dataclass(frozen=True)
class Chart:
    """A chart of the page, with words about it.

    Attributes:
        title: the title, which names the quantity with its unit.
        caption: sentences on how to read the chart.
        svg: the drawing, as inline SVG; ``None`` where there is nothing to draw.
        more: further explanations of the chart, which the page shows folded.
        narrow: the same drawing for the screen of a phone, if ``svg`` is too wide for it.
        figures: numbers that stand between the drawing and the caption, in words.
    """

    title: str
    caption: str
    svg: Markup | None
    more: str = ""
    narrow: Markup | None = None
    figures: str = ""


def story_figures(
    index: Index, found: Sequence[Attempt], asked: Sequence[Remedy]
) -> tuple[Chart | None, Chart | None]:
    """Return two charts of accuracy and PSNR over the rounds: for all clients together, and with a
    panel for each client.

    The first is ``None`` if nothing was measured. The second is ``None`` if a single client was
    attacked, or more than four. ``found`` are the results of the attack, and ``asked`` the defenses
    that were tried on copies of the updates.
    """
    made = [attempt for attempt in found if attempt.psnr is not None]
    accuracy = by_round(index.series("utility", "test_accuracy"))
    if not made and not accuracy:
        return None, None
    told = [remedy for remedy in asked if remedy.under][:MAX_LINES]
    stopped = ended(index, found)
    pooled = [_panel(None, made, told, stopped)] if made else []
    names = ["Accuracy"] * bool(accuracy) + ["leakage"] * bool(made)
    title = f"{' and '.join(names).capitalize()} over the rounds"
    caption = "How good the trained model is after each round."
    if made:
        caption = _story_caption(pooled, bool(accuracy), index.sample)
    text = _description(pooled, accuracy)
    chart = Chart(
        title, caption, story_chart(accuracy, pooled, "story", text, is_wide=True),
        _story_details(psnr_told(index), pooled, told, len(asked)) if made else "",
        story_chart(accuracy, pooled, "narrow", text),
    )  # fmt: skip
    clients = most_at_risk_first(grouped_by_client(made))
    if not 1 < len(clients) <= MAX_PANELS:
        return chart, None
    panels = [_panel(client, made, told, stopped) for client in clients]
    svg = story_chart(accuracy, panels, "clients", _description(panels, accuracy))
    more = _story_details("Height is PSNR in decibels.", panels, told, len(asked))
    return chart, Chart("Each client by itself, most at risk first", caption, svg, more)


def _description(panels: Sequence[Panel], accuracy: Mapping[int, Sequence[float]]) -> str:
    shares = {r: [100 * value for value in held] for r, held in accuracy.items()}
    told = [f"Test accuracy in %: {_tell(shares)}"] if accuracy else []
    if panels:
        told.append("PSNR of the reconstructions by round.")
    told += [f"{panel.title.capitalize()}: {_tell(_psnr_by_round(panel))}" for panel in panels]
    return " ".join(told)


def _panel(
    client: int | None,
    made: Sequence[Attempt],
    told: Sequence[Remedy],
    stopped: Set[tuple[int, int]],
) -> Panel:
    def of(found: Iterable[Attempt]) -> list[Attempt]:
        return [a for a in found if client is None or a.key[1] == client]

    own = of(made)
    dots = grouped(
        (a.key[0], Dot(a.psnr, a.grade or "", a.key[:2] in stopped))
        for a in own
        if a.psnr is not None
    )
    blind = grouped((a.key[0], a.blind) for a in own if a.blind is not None)
    tried = {
        remedy.name: grouped((a.key[0], a.psnr) for a in of(remedy.under) if a.psnr is not None)
        for remedy in told
    }
    under = {name: reached for name, reached in tried.items() if reached}
    over = {
        remedy.name: {place[0] for place, is_over in remedy.ended.items()
                      if is_over and client in (None, place[1])}
        for remedy in told
    }  # fmt: skip
    return Panel(client, dots, under, blind, over)


def _psnr_by_round(panel: Panel) -> dict[int, list[float]]:
    return {r: [dot.psnr for dot in dots] for r, dots in panel.dots.items()}


def _story_caption(panels: Sequence[Panel], with_accuracy: bool, noun: Sample) -> str:
    """Return the caption, on how to read the dots, of the chart of PSNR over the rounds.

    ``with_accuracy`` tells whether accuracy is drawn, too, and ``noun`` has the nouns for samples.
    """
    text = f"Each dot is one {noun.one} in one round; the higher, the nearer the attack came to it."
    if with_accuracy:
        text = f"On top: how good the trained model is. Below: {text[0].lower()}{text[1:]}"
    medians = any(rounds for panel in panels for rounds in panel.ended.values())
    if medians or any(dot.ended for panel in panels for d in panel.dots.values() for dot in d):
        behind = " (behind a median, at least one)" * medians
        text += (
            f" Hollow: the time limit cut the attack off{behind}, so that a fall is no sign of "
            f"safety."
        )
    return text


def _story_details(
    told_first: str, panels: Sequence[Panel], told: Sequence[Remedy], asked: int
) -> str:
    """Return the text below the chart of PSNR over the rounds that the page shows folded.

    The text begins with ``told_first``, and explains scales, bands and time limits. ``told`` are
    the defenses whose medians are drawn, of ``asked`` defenses in all.
    """
    text = told_first
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
    most = max(len(dots) for panel in panels for dots in panel.dots.values())
    if most > MAX_DOTS_A_ROUND:
        text += _dots(_psnr_by_round(max(panels, key=lambda p: max(map(len, p.dots.values())))))
    return text


def round_figures(index: Index, kind: str) -> list[Chart]:
    """Return a chart over the rounds for each quantity of a kind of record, such as ``score``.

    Scores that are equal for all samples are left out, and so is the test accuracy, which another
    chart shows.
    """
    found = []
    for i, name in enumerate(index.names(kind)):
        series = index.series(kind, name)
        groups, unit = by_round(series), unit_of(series)
        if name.endswith("accuracy"):
            groups, unit = {r: [100 * v for v in held] for r, held in groups.items()}, "%"
        if (
            not groups
            or (kind == "score" and is_constant(series))
            or name == "test_accuracy"  # the first chart of the page shows it
        ):
            continue
        description = f"{label(name)} by round: {_tell(groups)}"
        svg = rounds_chart(groups, f"{kind}{i}", description, unit)
        direction = next(iter(series.values())).direction
        caption = f"Its paper claims: {direction}." if direction else ""
        found.append(Chart(heading(name, unit), caption + _dots(groups), svg))
    return found


def _dots(groups: dict[int, list[float]]) -> str:
    most = max(map(len, groups.values()))
    if most == 1:
        return ""
    if most > MAX_DOTS_A_ROUND:
        return f" Dots: {MAX_DOTS_A_ROUND} of up to {most:,} values a round, even by rank."
    return " Dots: every value."


def _tell(groups: Mapping[int, Sequence[float]]) -> str:
    """Return a description of a chart for screen readers.

    The text tells the values of the first and the last round, or their median if a round has
    several. ``groups`` are the values by round.
    """
    first, last = min(groups), max(groups)
    name = "median " * (max(map(len, groups.values())) > 1)
    ends = [f"{name}{number(median(groups[r]))} in round {r}" for r in (first, last)]
    return f"{', '.join(dict.fromkeys(ends))}."


BOUNDS = {
    "bayesian_bound_rmse": (
        "Bayesian",
        "The Bayesian line is what the best attacker with a Gaussian prior of independent pixels "
        "reaches on average, if the network were linear. It binds on no single sample, and an "
        "attacker with a better prior may cross it.",
    ),
    "cramer_rao_bound_rmse": (
        "Cramér–Rao",
        "The Cramér–Rao line binds on unbiased attackers: without a prior, and without "
        "clamping to the range of pixels.",
    ),
}
"""The bounds on an attack that a chart shows: the bound's name and its conditions, by the name of
the score that computes it.
"""


def corridors(index: Index, metadata: Mapping[str, Any]) -> list[Chart]:
    """Return one chart of each sample's PSNR under the attack and of the bounds on it from scores.

    The list is empty if no sample has both a PSNR and a bound. The entry ``input_std`` of
    ``metadata``, the normalisation's standard deviations, turns bounds in units of model inputs
    into pixels.
    """
    scale = smallest_std(metadata)
    reached = known(index.series("metric", "psnr"))
    limits: dict[str, dict[Key, float]] = {}
    for name in BOUNDS:
        found = {
            key: -20 * math.log10(scale * bound)
            for key, bound in known(index.series("score", name)).items()
            if scale and key in reached and bound
        }
        if found:
            limits[name] = found
    if not limits:
        return []
    ordered = {
        key: max(found.get(key, -math.inf) for found in limits.values())
        for key in reached
        if any(key in found for found in limits.values())
    }
    keys = sorted(ordered, key=lambda key: (-ordered[key], key))
    step = math.ceil(len(keys) / MAX_DOTS)
    shown = keys[::step]
    told = [_gaps_told(BOUNDS[name][0], found, reached) for name, found in limits.items()]
    conditions = [BOUNDS[name][1] for name in limits]
    svg = corridor_chart(
        [reached[key] for key in shown],
        {BOUNDS[name][0]: [found.get(key) for key in shown] for name, found in limits.items()},
        "corridor",
        f"PSNR of the attack and what bounds leave possible, by sample. {' '.join(told)}",
    )
    caption = (
        "Dots: the attack. Lines: on average, no attacker of the bound’s class gets above. Between "
        f"them lies what a better attack may find. {' '.join([*told, *conditions])}"
    )
    if step > 1:
        caption += f" Only every {step}th of {len(keys):,} samples is drawn."
    return [Chart("Attack and bounds, PSNR in dB", caption, svg)]


def smallest_std(metadata: Mapping[str, Any]) -> float:
    """Return the least standard deviation of the normalisation over channels; 0 if unknown.

    The number is in pixel units per unit of a model input. A lower bound of the error in model
    inputs, times this number, is a lower bound of the error in pixels.
    """
    given = metadata.get("input_std")
    if not isinstance(given, list) or not given:
        return 0.0
    if not all(isinstance(std, (int, float)) and 0 < std < math.inf for std in given):
        return 0.0
    return float(min(given))


def _gaps_told(name: str, limits: Mapping[Key, float], reached: Mapping[Key, float]) -> str:
    """Return a sentence on how far the attack's PSNR lies below or above the bound ``name``.

    ``limits`` holds the bound and ``reached`` the attack's PSNR, both in dB by (round, client,
    sample).
    """
    gaps = [limit - reached[key] for key, limit in limits.items()]
    typical = median(gaps) or 0.0
    side = "below" if typical >= 0 else "above"
    crossed = sum(gap < 0 for gap in gaps)
    return (
        f"The attack stays {decibel(abs(typical))} dB {side} {name} (median of "
        f"{count(len(gaps), 'sample')}, of which {crossed or 'none'} above it)."
    )


OUTCOMES = ("psnr", "rmse", "mse")


AVOID = "Do not rely on it here."


def score_figures(index: Index) -> list[Chart]:
    """Return a chart of each risk score against the attack's outcome, its PSNR on the same samples.

    RMSE or MSE is compared where no PSNR was recorded. A score that is equal for all samples is
    left out. Without any of these metrics the list is empty. The figures of a chart are the number
    n of samples, the rank correlation ρ within rounds, and its p-value times the number of scores,
    at most 1. The caption says whether the score ranks the samples in the order that it claims.
    """
    outcome = next((name for name in OUTCOMES if values(index.series("metric", name))), None)
    names = [name for name in index.names("score") if not is_constant(index.series("score", name))]
    if outcome is None:
        return []
    return [_score_figure(index, names, i, outcome) for i in range(len(names))]


def _score_figure(index: Index, scores: Sequence[str], i: int, outcome: str) -> Chart:
    name, noun, pairs = label(scores[i]), index.sample, score_pairs(index, scores[i], outcome)
    found = rank_agreement(pairs)
    p_value = None if found.p_value is None else min(1.0, found.p_value * len(scores))
    figures = [f"n\u00a0=\u00a0{count(found.n, noun.one)}"]
    if found.coefficient is not None and p_value is not None:
        rho = f"{found.coefficient:+.2f}".replace("-", "−")
        figures.insert(0, f"ρ within rounds\u00a0=\u00a0{rho}")
        figures.append(f"p\u00a0=\u00a0{number(p_value, 2)}")
    axis = heading(outcome, unit_of(index.series("metric", outcome)))
    svg = None
    if pairs:
        is_psnr = outcome == "psnr"
        blind = median(values(index.series("metric", "blind_psnr"))) if is_psnr else None
        description = f"{name} against {axis}: {', '.join(figures)}."
        svg = scatter_chart(
            [(x, y) for _, _, x, y in pairs], f"scatter{i}", description, axis, blind
        )
    direction = next(iter(index.series("score", scores[i]).values())).direction
    reading = _reading(found, p_value, direction, outcome, len(scores), noun)
    caption = f"{reading} Right: {name}. Up: {axis}."
    if len(pairs) > MAX_DOTS:
        caption += f" Only some of the {len(pairs):,} dots are drawn."
    return Chart(name, caption, svg, figures=" · ".join(figures))


def score_pairs(index: Index, score: str, outcome: str) -> list[tuple[int, Key, float, float]]:
    """Return (round, image, score, outcome) for each sample with a score and an outcome of the
    attack.

    The second entry identifies the image, in all rounds if images are numbered. A score of a whole
    client is paired with the client's median outcome.
    """
    metric, numbers = index.series("metric", outcome), index.series("client", "image")
    by_client = grouped((key[:2], value) for key, value in known(metric).items())
    pairs = []
    for key, record in sorted(index.series("score", score).items()):
        if key in metric:
            result = metric[key].value
        else:
            result = median(by_client.get(key[:2], [])) if key[2] < 0 else None
        told = numbers.get(key)
        image = (key[1], 0, key[2])
        if told is not None and told.value is not None:
            image = (key[1], 1, int(told.value))
        if record.value is not None and result is not None:
            pairs.append((key[0], image, record.value, result))
    return pairs


def _reading(
    found: RankAgreement,
    p_value: float | None,
    direction: str,
    outcome: str,
    scores: int,
    noun: Sample,
) -> str:
    if direction not in ("larger is safer", "larger leaks more", "smaller is safer"):
        return "The score claims no direction."
    if found.least * scores > SURE:
        return f"{_too_few_told(found, scores, noun)} {AVOID}"
    if found.coefficient is None or p_value is None:
        return f"All {noun.many} are equal: no rank correlation. {AVOID}"
    leak_sign = 1 if direction in ("larger leaks more", "smaller is safer") else -1
    expected = leak_sign if outcome == "psnr" else -leak_sign
    sign = "positive" if expected > 0 else "negative"
    claim = f"The score claims “{direction}”: ρ with {label(outcome)} should be {sign}."
    if p_value > SURE:
        return f"{claim} Chance gives as much: this run does not tell. {AVOID}"
    if found.coefficient * expected > 0:
        return f"{claim} It is: the score ranks the {noun.many} of a round as the attack does."
    return f"{claim} It is not: the score ranks the {noun.many} backwards. {AVOID}"


def _too_few_told(found: RankAgreement, scores: int, noun: Sample) -> str:
    """Return sentences on a run with too few samples to judge its risk scores.

    The sentences tell how many samples could be compared, and how many are needed to judge
    ``scores`` scores.
    """
    needed = next(n for n in itertools.count(2) if 2 * scores <= SURE * math.factorial(n))
    among = f" for one of {scores} scores" if scores > 1 else ""
    return (
        f"Too few {noun.many} to tell: {found.n or 'none'} can be compared with others of a "
        f"round. It takes {needed}: of fewer, chance alone puts them into a perfect order{among} "
        f"in more than {100 * SURE:g} % of runs."
    )
