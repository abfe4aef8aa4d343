"""Make the report's first screen: the worst image, four key figures, a map of attacked updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from flwr_leakage.report.attempts import (
    LEAKED,
    Attempt,
    Fates,
    ended,
    labels_inferred,
    labels_right,
    pointed_to,
    worst_by_image,
    worst_of,
)
from flwr_leakage.report.gallery import Exhibit, Gallery, Picture
from flwr_leakage.report.grades import GRADES
from flwr_leakage.report.index import Index, by_round, count, decibel, median, percent, values, who
from flwr_leakage.report.large_clients import LargeClientsSection, inferred_beyond_guess
from flwr_leakage.report.membership import MembershipSection
from flwr_leakage.report.remedies import Remedy

UNTRIED = "not tested"


@dataclass(frozen=True)
class Tile:
    """One key figure of the first screen.

    Attributes:
        term: the quantity, in words.
        value: the figure as text; ``not tested`` if there is none.
        guess: the figure that a guess without any update has, in words, or the reason why there is
            none.
        is_leak: whether the figure shows a leak.
    """

    term: str
    value: str
    guess: str = ""
    is_leak: bool = False


def tiles(
    index: Index,
    metadata: Mapping[str, Any],
    found: Sequence[Attempt],
    members: MembershipSection | None,
    large: LargeClientsSection | None,
) -> tuple[Tile, ...]:
    """Return four key figures: samples seen, labels inferred, members found, and test accuracy.

    Each has the figure of a guess without any update beside it. ``members`` and ``large`` are the
    report's sections on membership tests and on clients of many samples, ``None`` where there is
    none.
    """
    return (
        _seen(index, found),
        _labels(index, metadata, found, large),
        _members(members),
        _accuracy(index),
    )


def _seen(index: Index, found: Sequence[Attempt]) -> Tile:
    sample = index.sample
    each = worst_by_image(found) or [attempt for attempt in found if attempt.grade]
    noun = sample.many if worst_by_image(found) else "attempts"
    if not any(attempt.grade for attempt in each):
        attacked = found or values(index.series("attack", "objective"))
        return Tile(sample.many, *(("not graded", "originals unknown") if attacked else (UNTRIED,)))
    seen = sum(attempt.grade in LEAKED for attempt in each)
    parts = sum(attempt.grade == "partly" for attempt in each)
    more = f", {parts:,} in part" if parts else ""
    return Tile(noun, f"{seen:,} of {len(each):,} seen{more}", "blind guess: 0", seen > 0)


def _labels(
    index: Index,
    metadata: Mapping[str, Any],
    found: Sequence[Attempt],
    large: LargeClientsSection | None,
) -> Tile:
    """Return the key figure on labels: how many the attack, and a guess without an update, have
    right.

    If no attack inferred labels, the numbers are those of ``large``, the section on clients of many
    samples.
    """
    told = labels_right(index, found)
    if told and labels_inferred(index, metadata):
        guess = "blind guess not known"
        if told.by_chance is not None:
            chance = "" if told.is_beyond_guess else f", up to {told.by_chance:,} by chance"
            guess = f"in all attempts; naming always one class has {told.commonest:,}{chance}"
        return Tile("labels inferred", f"{told.right:,} of {told.whole:,}", guess)
    if large and large.right is not None:
        return Tile("labels inferred", large.right, f"blind guess: {large.blind}")
    if (
        not told
        and values(index.series("attack", "objective"))
        and labels_inferred(index, metadata)
    ):
        return Tile("labels inferred", "not graded", "originals unknown")
    return Tile("labels inferred", UNTRIED, "the attacker was given them" if told else "")


def _members(members: MembershipSection | None) -> Tile:
    term = "given records: was each used?"
    if members is None:
        return Tile(term, UNTRIED)
    value = f"{members.called} of {len(members.table.rows)} found"
    chance = "or near copies; by chance in at most 1 of 100 runs, if what it assumes holds"
    return Tile(term, value, chance, members.called > 0)


def _accuracy(index: Index) -> Tile:
    series = index.series("utility", "test_accuracy")
    accuracy, notes = by_round(series), {key[0]: record.note for key, record in series.items()}
    if not accuracy:
        why = max(notes.items(), default=(0, "no evaluation told one"))[1]
        return Tile("test accuracy", UNTRIED, why)
    last = max(accuracy)
    term = f"test accuracy after round {last}" if last else "test accuracy before training"
    guess = notes[last] or "blind guess not known"
    if last and 0 in accuracy:
        guess = f"before training: {percent(median(accuracy[0]), 1)}"
    return Tile(term, percent(median(accuracy[last]), 1), guess)


def worst(gallery: Gallery, asked: Sequence[Remedy]) -> list[tuple[Picture, str, str]]:
    """Return the pictures of the sample that leaks most, each with its heading and the attack's
    result in words; an empty list if the gallery has no sample.

    One picture is the original, one the reconstruction from the update as sent, and one that from a
    copy of the update under the defense that hides most of those in ``asked``.
    """
    if not gallery.exhibits:
        return []
    exhibit = gallery.exhibits[0]
    roles = {picture.role: picture for picture in exhibit.pictures}
    made = "an exact copy" if exhibit.grade == "exact" else f"{exhibit.grade}, {exhibit.psnr}"
    shown = [
        (roles["original"], "private original", exhibit.place),
        (roles["reconstruction"], "what the server made of it", made),
    ]
    best = min((remedy for remedy in asked if remedy.under), key=_left, default=None)
    if best is not None and (under := roles.get(best.role)):
        shown.append((under, best.role, _result(exhibit, best)))
    return shown


def _left(remedy: Remedy) -> tuple[float, float, float]:
    """Return a sort key that is smaller for a defense under which less is seen.

    Its entries are the share of images that are exact or recognisable, the share that is ``partly``
    seen, and the median PSNR in dB.
    """
    held = [attempt.grade for attempt in remedy.under]
    psnr = median([attempt.psnr for attempt in remedy.under if attempt.psnr is not None])
    leaked = sum(grade in LEAKED for grade in held) / len(held)
    return leaked, held.count("partly") / len(held), psnr or 0.0


def _result(exhibit: Exhibit, remedy: Remedy) -> str:
    for attempt in remedy.under:
        if attempt.key == exhibit.key:
            cut = ", cut off by time" if remedy.ended.get(exhibit.key[:2]) else ""
            how = f" {attempt.decided}" * bool(attempt.decided)
            told = f"{attempt.grade or 'no grade'}{how}, {decibel(attempt.psnr)} dB{cut}"
            return f"in a trial: {told}"
    return "no result"


@dataclass(frozen=True)
class Map:
    """A map of clients by rounds that shows the worst grade of each attacked update.

    Attributes:
        svg: the drawing, with a unit square for each attacked update, a bar in it if the time limit
            ended the attack, a diamond if only its original was identified, and a small square
            where only labels were inferred.
        rows: words for the clients, each with the number of rows that they stand for.
        columns: words for the rounds, each with the number of columns.
        legend: the CSS style names that occur, each with its explanation.
    """

    svg: Markup
    rows: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    legend: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        """Return the map's heading, which speaks of grades only if an update has one."""
        is_graded = any(name in GRADES for name, _ in self.legend)
        return "Worst grade of each update" if is_graded else "Updates by client and round"


MAX_LABELS = 12
"""The largest number of labels along a side of the map, a choice of layout. With more clients or
rounds, only every second, third, … has a label.
"""

MAX_GAPS = 40
"""The largest number of clients or rounds for which the map has gaps between its squares. With
more, the squares would be too small for gaps.
"""

MAX_ROUNDS = 10_000
"""The largest number of rounds that have a column each, which bounds the page's size. If there are
more, only rounds with records have one.
"""

STATES: dict[str, str] = {
    **dict(zip(GRADES[:-1], GRADES[:-1], strict=True)),
    "nothing": "nothing",
    "tried": "tried, without a grade",
    "identified": "diamond: its original identified (more are, in this run, than by chance)",
    "labels": "bar inside: labels alone inferred in this round, better than guessed",
    "cut": "bar below: cut off by time",
}
"""The CSS names of the marks on the map, with words for the legend. The first five are the results
of an attacked update, worst first. ``identified`` marks an update of grade ``nothing`` of which an
answer is more like its original than like all other candidates. ``labels`` marks an update from
which only labels were inferred, and ``cut`` an attack that the time limit ended.
"""


def heat_map(index: Index, found: Sequence[Attempt], fate: Fates, rounds_done: int) -> Map | None:
    """Return the map of clients by rounds with the worst grade of an answer to each update.

    The result is ``None`` for a run without a record of any client. ``found`` are the
    graded answers to updates, ``fate`` tells which updates were attacked and which were not, and
    ``rounds_done`` is the number of the last round with a record.
    """
    state = dict.fromkeys(fate.attacked, "tried")
    worst_in = worst_of((attempt.key[:2], attempt) for attempt in found)
    state |= {place: attempt.grade or "tried" for place, attempt in worst_in.items()}
    took_part = {key[:2] for key in index.series("client", "images")}
    inferred = inferred_beyond_guess(index)
    known = state.keys() | fate.spared.keys() | took_part | inferred
    clients = sorted({client for _, client in known})
    if not clients:
        return None
    told = {server_round for server_round, _ in known}
    last = max(rounds_done, *told)
    rounds = sorted(told) if last > MAX_ROUNDS else range(1, last + 1)
    column_of = {server_round: column for column, server_round in enumerate(rounds)}
    drawn: dict[str, list[str]] = {}
    row_of = {client: row for row, client in enumerate(clients)}
    for (server_round, client), name in sorted(state.items()):
        drawn.setdefault(name, []).append(f"M{column_of[server_round]} {row_of[client]}h1v1h-1z")
    unseen = {place for place, name in state.items() if name == "nothing"}
    for server_round, client in sorted(pointed_to(found) & unseen):
        corner = f"M{column_of[server_round]}.5 {row_of[client]}.2"
        drawn.setdefault("identified", []).append(f"{corner}l.3 .3-.3 .3-.3-.3z")
    for server_round, client in sorted(inferred - state.keys()):
        corner = f"M{column_of[server_round]}.3 {row_of[client]}.3"
        drawn.setdefault("labels", []).append(f"{corner}h.4v.4h-.4z")
    for server_round, client in sorted(ended(index, found) & state.keys()):
        corner = f"M{column_of[server_round]} {row_of[client]}.7"
        drawn.setdefault("cut", []).append(f"{corner}h1v.3h-1z")
    paths = "".join(
        f'<path class="g-{name}" d="{"".join(drawn[name])}"/>' for name in STATES if name in drawn
    )
    legend = [(name, words) for name, words in STATES.items() if name in drawn]
    marked = ", ".join(f"{len(drawn[name])} {words}" for name, words in legend)
    description = (
        f"{count(len(clients), 'client')} in {count(len(rounds), 'round')}; updates by their worst "
        f"grade: {marked or 'none was attacked'}."
    )
    fine = ' class="fine"' if max(len(clients), len(rounds)) > MAX_GAPS else ""
    svg = Markup(
        f'<svg{fine} role="img" aria-label="{escape(description)}" preserveAspectRatio="none" '
        f'viewBox="0 0 {len(rounds)} {len(clients)}">{paths}</svg>'
    )
    if len(state) < len(clients) * len(rounds):
        legend.append(("untried", f"{index.sample.many} not attacked"))
    names = [who(client) if client >= 0 else "aggregate" for client in clients]
    return Map(svg, _labelled(names), _labelled([str(each) for each in rounds]), tuple(legend))


def _labelled(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    step = -(-len(names) // MAX_LABELS)
    return tuple((name, min(step, len(names) - i * step)) for i, name in enumerate(names[::step]))
