"""What to know and to do, one step at a time: who is at risk, what helped, what was not tested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.attempts import (
    LEAKED,
    Attempt,
    Fates,
    does,
    grouped_by_client,
    most_at_risk_first,
    tally,
    worst_by_image,
)
from flwr_leakage.report.header import describe
from flwr_leakage.report.index import Index, Table, count, median, values
from flwr_leakage.report.remedies import Remedy, told_of_time
from flwr_leakage.report.words import graded, several

MAX_CLIENTS = 4
MAX_GROUPS = 6


@dataclass(frozen=True)
class Step:
    """One thing to know or to do.

    Attributes:
        term: what it is about, in a word or two.
        text: in plain sentences.
        items: the entries of a list below the text.
        table: numbers below it, with the title that they have; or ``None``.
        note: in small print below all.
        commands: to be typed, one a line; folded, below the sentence ``fold``.
        fold: what the commands are for.
    """

    term: str
    text: str
    items: tuple[str, ...] = ()
    table: tuple[str, Table] | None = None
    note: str = ""
    commands: tuple[str, ...] = ()
    fold: str = ""


def with_grade(found: Sequence[Attempt], grades: Sequence[str]) -> set[int]:
    """The clients of whom an image has one of the grades."""
    return {attempt.key[1] for attempt in found if attempt.grade in grades}


def named(clients: set[int], limit: int = 8) -> str:
    """Clients by their numbers, or how many; or the aggregate."""
    return several(sorted(clients), limit=limit) if min(clients) >= 0 else "the aggregate"


def verb(clients: set[int], one: str, many: str) -> str:
    """The one word for a single client, the other for several."""
    return one if len(clients) == 1 else many


def who_is_at_risk(
    found: Sequence[Attempt], at_risk: set[int], index: Index, fate: Fates
) -> list[Step]:
    """The clients of which something is seen, with what they do and the rounds."""
    if not at_risk:
        return []
    doing = does(index)
    groups = grouped_by_client(a for a in found if a.key[1] in at_risk)
    told = []
    for client in most_at_risk_first(groups)[:MAX_CLIENTS]:
        here = groups[client]
        name = named({client})
        what = f" ({doing[client]})" if client in doing else ""
        tried = count(len(here), "attempt")
        told.append(f"{name}{what}: of {tried} {graded(tally(here))}; seen {_when(here)}")
    more = len(groups) - len(told)
    rest = f"; and {count(more, 'other client')} (see Clients)" if more else ""
    text = ". ".join(f"{each[0].upper()}{each[1:]}" for each in told) + rest
    steps = [Step("Who is at risk", f"{text}. An attempt is one image in one attacked round.")]
    return steps + by_round_told(found, fate)


def by_round_told(found: Sequence[Attempt], fate: Fates) -> list[Step]:
    """Whose images are seen in which round, and which rounds were not attacked."""
    rounds_of: dict[str, list[int]] = {}
    rounds = sorted({a.key[0] for a in found})
    for server_round in rounds:
        here = [a for a in found if a.key[0] == server_round]
        leaking = with_grade(here, LEAKED)
        parts = with_grade(here, ("partly",)) - leaking
        told = [_images(here, leaking, LEAKED)] if leaking else []
        told += [f"in part {_images(here, parts, ('partly',))}"] if parts else []
        rounds_of.setdefault(" and ".join(told) or "nothing", []).append(server_round)
    if len(rounds) < 2:
        return []
    shown = list(rounds_of.items())[:MAX_GROUPS]
    left = sum(map(len, rounds_of.values())) - sum(len(held) for _, held in shown)
    text = "; ".join(f"{several(held, 'round')}: {told}" for told, held in shown)
    more = f"; and {count(left, 'other round')}" if left else ""
    if resting := _resting(fate, rounds):
        more += (
            f"; {several(resting, 'round')} {'was' if len(resting) == 1 else 'were'} not attacked"
        )
    return [Step("Seen, by round", f"{text[0].upper()}{text[1:]}{more} (see Round by round).")]


def _when(here: Sequence[Attempt]) -> str:
    """In which rounds something of a client is seen, in which only in part."""
    attacked = sorted({a.key[0] for a in here})
    seen = sorted({a.key[0] for a in here if a.grade in LEAKED})
    parts = sorted({a.key[0] for a in here if a.grade == "partly"} - set(seen))
    if seen == attacked and len(seen) > 1:
        return f"in every attacked round ({several(seen, 'round')})"
    told = [f"in {several(seen, 'round')}"] if seen else []
    told += [f"in part in {several(parts, 'round')}"] if parts else []
    whole = f" (attacked: {several(attacked, 'round')})" if len(attacked) > 1 else ""
    return f"{', '.join(told)}{whole}"


def _images(here: Sequence[Attempt], clients: set[int], grades: Sequence[str]) -> str:
    """The images of some clients that have one of the grades: one, the only one, or several."""
    theirs = [a for a in here if a.key[1] in clients]
    each = worst_by_image(theirs) or theirs
    noun = "images"
    if sum(a.grade in grades for a in each) == 1:
        noun = "the image" if len(each) == 1 else "an image"
    return f"{noun} of {named(clients, MAX_CLIENTS)}"


def _resting(fate: Fates, attacked: Sequence[int]) -> list[int]:
    """The rounds in which nobody was attacked."""
    return sorted({server_round for server_round, _ in fate.spared} - set(attacked))


def what_to_mend(unsure: set[int]) -> list[Step]:
    """Clients whose update is not the one that they were seen to train."""
    if not unsure:
        return []
    return [
        Step(
            "Mend first",
            f"What {named(unsure)} sent is not what {verb(unsure, 'it was', 'they were')} seen "
            f"to train (replay check). Where nothing was found there, that counts for nothing. "
            f"What was found was found all the same.",
        )
    ]


def what_helps(
    index: Index, asked: Sequence[Remedy], at_risk: set[int], metadata: Mapping[str, Any]
) -> list[Step]:
    """Which defense that was measured here hides what leaks."""
    if not at_risk:
        return []
    own = defense_of(metadata)
    despite = f"It leaks although the run trained under {own}. " if own else ""
    if not asked:
        text = "No other defense was measured on these updates (what_if), so this run names none."
        return [Step("What helps", despite + text)]
    text = " ".join(_effect(remedy, at_risk, metadata) for remedy in asked)
    notes = [_besides(remedy, at_risk) for remedy in asked]
    caveat = "The attack was the same as without the defense; one made for it may reach more."
    table = _seen_table(index, asked, at_risk)
    note = " ".join(filter(None, (*notes, caveat)))
    return [Step("What helps", despite + text, table=table, note=note)]


def _effect(remedy: Remedy, at_risk: set[int], metadata: Mapping[str, Any]) -> str:
    """What a defense does, and whether it hides what leaks."""
    name = f"{remedy.name[0].upper()}{remedy.name[1:]}"
    under = [a for a in remedy.under if a.key[1] in at_risk]
    if not under:
        return f"{name} was not measured on them."
    still = with_grade(under, LEAKED)
    if still:
        text = f"does not hide it: {named(still)} still {verb(still, 'leaks', 'leak')}"
        if parts := with_grade(under, ("partly",)) - still:
            shown = _images(under, parts, ("partly",))
            text += (
                f", and {shown} still {'show' if shown.startswith('images') else 'shows'} in part"
            )
    elif with_grade(under, ("partly",)):
        text = "hides it in part only: no image is exact or recognisable, but parts show"
    elif not tally(under):
        text = "was tried without a result that can be graded"
    else:
        text = "hides it from this attack"
    words = metadata.get("defenses_in_words")
    told = words.get(remedy.name) if isinstance(words, Mapping) else None
    means = f", by which {told}," if told and isinstance(told, str) else ""
    return f"{name}{setting(remedy, metadata)}{means} {text}."


def _besides(remedy: Remedy, at_risk: set[int]) -> str:
    """Whether originals are still told apart under a defense, and how often time ran out."""
    under = [a for a in remedy.under if a.key[1] in at_risk]
    if not under:
        return ""
    ranked = [a for a in under if a.rank is not None]
    first = sum(a.rank == 1 for a in ranked)
    identified = ""
    if first:
        tells = "tells its" if first == 1 else "tell their"
        whole = count(len(ranked), "attempt")
        identified = f" {first} of {whole} still {tells} original from others."
    ended = {place: over for place, over in remedy.ended.items() if place[1] in at_risk}
    return f"Under {remedy.name}:{identified}{told_of_time(ended)}"


def _seen_table(
    index: Index, asked: Sequence[Remedy], at_risk: set[int]
) -> tuple[str, Table] | None:
    """How much is seen without each defense and with it: of images, where told apart."""
    measured = []
    for remedy in asked:
        if under := [a for a in remedy.under if a.key[1] in at_risk]:
            before = [a for a in remedy.before if a.key[1] in at_risk]
            measured.append((remedy, (before, under)))
    if not measured:
        return None
    by_image = all(worst_by_image(found) for _, both in measured for found in both)
    rows = []
    for remedy, both in measured:
        each = [worst_by_image(found) if by_image else found for found in both]
        cells = [
            f"{sum(a.grade in grades for a in found)} of {len(found)}"
            for grades in (LEAKED, ("partly",))
            for found in each
        ]
        change = median(values(index.series("what_if", f"{remedy.name}/relative_change")))
        rows.append((remedy.name, *cells, f"{100 * change:.0f} %" if change is not None else "–"))
    noun = "images" if by_image else "attempts"
    columns = ("defense", f"{noun} seen without it", "seen with it", "in part without it",
               "in part with it", "change of the update")  # fmt: skip
    notes = (
        "Seen: graded exact or recognisable. In part: graded partly. Change: of the update’s size "
        "(Euclidean norm, median); it says little of accuracy.",
    )
    title = "What the attack shows without each defense and with it"
    return title, Table(columns, tuple(rows), notes)


def setting(remedy: Remedy, metadata: Mapping[str, Any]) -> str:
    """The settings that a what-if was tried with, in brackets; empty where not known."""
    _, settings = describe(_node(remedy, metadata))
    return f" ({settings})" if settings else ""


def _node(remedy: Remedy, metadata: Mapping[str, Any]) -> Any:
    """The configuration of a what-if; ``None`` where it is not known."""
    config = metadata.get("config")
    nodes = config.get("what_if") if isinstance(config, Mapping) else None
    return nodes.get(remedy.name) if isinstance(nodes, Mapping) else None


def defense_of(metadata: Mapping[str, Any]) -> str:
    """The defense that the run trained under, or empty."""
    config = metadata.get("config")
    name, _ = describe(config.get("defense") if isinstance(config, Mapping) else None)
    given = metadata.get("defense")
    named = given if isinstance(given, str) and given else name
    return "" if named in ("none", "Defense") else named


def is_defended(metadata: Mapping[str, Any]) -> bool:
    """Whether some client may have changed its update by a defense before it sent it."""
    return bool(defense_of(metadata) or metadata.get("own_config_clients"))


def what_was_not_tested(fate: Fates, found: Sequence[Attempt]) -> Step:
    """Clients and rounds that were not attacked, and what no run of this kind tests."""
    attacked = {*fate.answered, *fate.unanswered} | {a.key[:2] for a in found}
    clients = {client for _, client in attacked}
    rounds = {server_round for server_round, _ in attacked}
    spared = {client for _, client in fate.spared} - clients
    resting = _resting(fate, sorted(rounds))
    missed = [several(sorted(spared))] if spared and min(clients, default=0) >= 0 else []
    missed += [several(resting, "round")] if resting else []
    text = f"{' and '.join(missed)}; " if missed else ""
    text += (
        "longer time limits and stronger attacks; a server that breaks the protocol; membership "
        "and other properties of the data"
    )
    if fate.unanswered:
        failed = {client for _, client in fate.unanswered}
        text += f"; {named(failed)} where the attack gave no result"
    return Step("Not tested", f"{text[0].upper()}{text[1:]} (see What is not covered).")
