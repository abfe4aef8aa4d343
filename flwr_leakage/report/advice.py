"""What to do now: what the numbers of a run say for and against going on as it is.

It is derived from what was measured, and promises nothing beyond that.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    LEAKED,
    Attempt,
    Fates,
    attempts,
    condition_told,
    does,
    fates,
    graded,
    grouped_by_client,
    identifying_told,
    limit_told,
    most_at_risk_first,
    seen_of,
    tally,
    time_limit,
    worst_by_image,
)
from flwr_leakage.report.commands import rerun
from flwr_leakage.report.index import Index, Step, Table, count, median, several, values
from flwr_leakage.report.remedies import Remedy, told_of_time, what_it_costs
from flwr_leakage.report.replays import real_update_told, replays
from flwr_leakage.report.story import defense_of, is_defended
from flwr_leakage.report.tried import more_time, worth
from flwr_leakage.tracking.text import plain_text


class Advice(NamedTuple):
    """Whether training may go on as it is, and what to do.

    Attributes:
        headline: the answer in a sentence of at most 20 words.
        answer: the same with all that it rests on.
        lines: what to do, in at most five short lines.
        steps: the same at length, with what was measured.
    """

    headline: str
    answer: str
    lines: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def do(self) -> tuple[str, ...]:
        """Lines on what would say more, with its command; none where the run says enough."""
        steps = [step for step in self.steps if step.term == "Do"]
        return tuple(line for step in steps for line in (step.text, *step.commands))


def advise(
    index: Index,
    metadata: Mapping[str, Any],
    asked: Sequence[Remedy],
    events: Sequence[RunEvent] = (),
) -> Advice:
    """Derive the advice from the records, and from the metadata the defense of the run."""
    found, fate = attempts(index), fates(index)
    leaking = with_grade(found, LEAKED)
    partly = with_grade(found, ("partly",)) - leaking
    replayed = replays(index, events)
    unsure = {client for _, client in replayed.other}
    nothing_seen = worth(index, events, metadata, found, fate)
    if leaking:
        headline = f"Not as it is: the server can see {_what(found)}, from {_briefly(leaking)}."
        answer = f"Not as it is. {_seen(found, leaking)}, without breaking the protocol."
    elif partly:
        whose = _briefly(partly)
        headline = f"Not without a decision: parts of private images of {whose} can be seen."
        answer = (
            f"Not without a decision. Parts of private images of {named(partly)} can be seen "
            f"from what the server receives, and a stronger attack may show more."
        )
    else:
        headline, answer = nothing_seen.headline, nothing_seen.answer
    at_risk = leaking | partly
    defended, more = is_defended(metadata), "The command that does it"
    steps = [
        Step("Is it the real update?", real_update_told(replayed, fate.attacked, defended)),
        Step("Mend first", _to_mend(unsure)),
        *what_it_costs(index, asked, metadata, bool(at_risk)),
        Step("Not tested", _not_tested(fate, found)),
    ]
    if at_risk:
        steps[:0] = [
            Step("Who is at risk", _at_risk(found, at_risk, index)),
            Step("Seen, by round", _seen_by_round(found, fate)),
        ]
        steps.insert(4, _what_helps(index, asked, at_risk, metadata))
        steps[-1:-1] = _what_to_ask(index, found, fate, asked, metadata)
    if not leaking:
        do, commands = nothing_seen.do, nothing_seen.commands
        steps.insert(-1, Step("Do", do, commands=commands, fold=more))
    lines = _in_short(index, found, asked, unsure, nothing_seen.do)
    return Advice(headline, answer, lines, tuple(step for step in steps if step.text))


MAX_LINES, MAX_LINE = 5, 150
"""Lines of what to do, and the characters that one has at most."""


def _in_short(
    index: Index, found: Sequence[Attempt], asked: Sequence[Remedy], unsure: set[int], do: str
) -> tuple[str, ...]:
    """Return what to do in short lines; the steps hold the reasons."""
    at_risk = with_grade(found, SEEN)
    lines = []
    if unsure:
        lines.append(f"Mend first: {_briefly(unsure)} trained something else than was sent.")
    if not at_risk:
        sentences = re.split(r"(?<=[.:]) (?=[A-Z])", do) if do else []
        lines += [plain_text(sentence, MAX_LINE) for sentence in sentences]
        decide = "Whoever answers for the data decides: no run tests all (What is not covered)."
        return (*lines[: MAX_LINES - 1], decide)
    if with_grade(found, LEAKED):
        lines.append("Stop, or leave out who is seen, until one of these changes was tested.")
    else:
        lines.append("Decide whether such parts may be seen, and test a change.")
    sizes = {key[1]: int(r.value) for key, r in index.series("client", "images").items() if r.value}
    whose = [sizes[client] for client in at_risk if client in sizes]
    those = f" (those seen had {_span(whose)})" if whose else ""
    lines += [
        _defense_in_short(asked),
        f"More images per client{those}, or secure aggregation, which shows the server sums only.",
        "Go on only if a new run sees no image, in part or whole, and no time limit ends an attack.",
    ]
    return tuple(lines)


def _defense_in_short(asked: Sequence[Remedy]) -> str:
    """Return what the defenses that were measured ask for."""
    if not asked:
        return "A defense on each update: this run measured none beside its own."
    told = {remedy.name: _result(remedy) for remedy in asked}
    hid = [name for name, result in told.items() if result == HID]
    if hid:
        return f"A defense on each update: {' and '.join(hid)} hid it here; measure its price."
    return (
        "A defense on each update: "
        + "; ".join(f"{name} {result}" for name, result in list(told.items())[:2])
        + "."
    )


HID = "hid them from this attack"


def _what(found: Sequence[Attempt]) -> str:
    return seen_of(each) if (each := worst_by_image(found)) else "private images"


def _briefly(clients: set[int]) -> str:
    """Return words for clients: at most five of them."""
    told = named(clients, 3)
    return told if len(told.split()) <= 5 else count(len(clients), "client")


def _seen(found: Sequence[Attempt], leaking: set[int]) -> str:
    """Return what of whom the server can see; how many images, if they can be told apart."""
    each = worst_by_image(found)
    parts = {attempt.key[1] for attempt in each if attempt.grade == "partly"}
    partly = sum(attempt.grade == "partly" for attempt in each)
    whom = leaking | parts
    what = f"{seen_of(each)} (exact or recognisable)" + f" and {partly} more in part" * bool(partly)
    if not each:
        what = "private images (exact or recognisable)"
    return f"What {named(whom)} {verb(whom, 'sends', 'send')} lets the server see {what}"


MAX_CLIENTS = 4
MAX_GROUPS = 6


def with_grade(found: Sequence[Attempt], grades: Sequence[str]) -> set[int]:
    """Return the clients of whom an image has one of the grades."""
    return {attempt.key[1] for attempt in found if attempt.grade in grades}


def named(clients: set[int], limit: int = 8) -> str:
    """Return words for clients: their numbers, how many they are, or the aggregate."""
    return several(sorted(clients), limit=limit) if min(clients) >= 0 else "the aggregate"


def verb(clients: set[int], one: str, many: str) -> str:
    """Return the first word for a single client, and the second one for several."""
    return one if len(clients) == 1 else many


def _at_risk(found: Sequence[Attempt], at_risk: set[int], index: Index) -> str:
    """Return words on the clients of whom something is seen, with what they do and the rounds."""
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
    return f"{text}. An attempt is one image in one attacked round."


def _seen_by_round(found: Sequence[Attempt], fate: Fates) -> str:
    """Return in which rounds whose images are seen, and which rounds were not attacked."""
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
        return ""
    shown = list(rounds_of.items())[:MAX_GROUPS]
    left = sum(map(len, rounds_of.values())) - sum(len(held) for _, held in shown)
    text = "; ".join(f"{several(held, 'round')}: {told}" for told, held in shown)
    more = f"; and {count(left, 'other round')}" if left else ""
    if resting := _resting(fate, rounds):
        more += (
            f"; {several(resting, 'round')} {'was' if len(resting) == 1 else 'were'} not attacked"
        )
    return f"{text[0].upper()}{text[1:]}{more} (see Round by round)."


def _when(here: Sequence[Attempt]) -> str:
    """Return in which rounds something of a client is seen, and in which only in part."""
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
    """Return words for clients' images of one of the grades: one, the only one, or several."""
    theirs = [a for a in here if a.key[1] in clients]
    each = worst_by_image(theirs) or theirs
    noun = "images"
    if sum(a.grade in grades for a in each) == 1:
        noun = "the image" if len(each) == 1 else "an image"
    return f"{noun} of {named(clients, MAX_CLIENTS)}"


def _resting(fate: Fates, attacked: Sequence[int]) -> list[int]:
    """Return the rounds in which nobody was attacked."""
    return sorted({server_round for server_round, _ in fate.spared} - set(attacked))


def _to_mend(unsure: set[int]) -> str:
    """Return words on clients whose update is not the one that they were seen to train."""
    if not unsure:
        return ""
    return (
        f"What {named(unsure)} sent is not what {verb(unsure, 'it was', 'they were')} seen to "
        f"train (replay check). Where nothing was found there, that counts for nothing. What was "
        f"found was found all the same."
    )


def _what_helps(
    index: Index, asked: Sequence[Remedy], at_risk: set[int], metadata: Mapping[str, Any]
) -> Step:
    """Return which defense that was measured here hides what leaks."""
    own = defense_of(metadata)
    despite = f"It leaks although the run trained under {own}. " if own else ""
    if not asked:
        text = "No other defense was measured on these updates (what_if), so this run names none."
        return Step("What helps", despite + text)
    effects = " ".join(_effect(remedy, at_risk) for remedy in asked)
    notes = [_besides(remedy, at_risk) for remedy in asked]
    caveat = "The attack was the same as without the defense; one made for it may reach more."
    table = _seen_table(index, asked, at_risk)
    note = " ".join(filter(None, (*notes, caveat)))
    cut_off = [remedy for remedy in asked if _is_cut_off(remedy, at_risk)]
    if not cut_off:
        return Step("What helps", despite + effects, table=table, note=note)
    do, changes = more_time(metadata)
    names = " and ".join(remedy.name for remedy in cut_off)
    ended = (
        f"the {limit_told(time_limit(metadata))} ended the attack on every update under {names}, "
        f"and with more time more may show. {do}"
    )
    text = f"Not established: {ended} {despite}{effects}"
    if len(cut_off) < len(asked):
        text = f"{despite}{effects} Of {names} it is not established: {ended}"
    commands, fold = rerun(metadata, changes), "The command that establishes it"
    return Step("What helps", text, (), table, note, commands, fold)


def _is_cut_off(remedy: Remedy, at_risk: set[int]) -> bool:
    """Return whether the time limit ended every attack on an update of theirs under a defense."""
    ended = [over for (_, client), over in remedy.ended.items() if client in at_risk]
    return bool(ended) and all(ended)


def _effect(remedy: Remedy, at_risk: set[int]) -> str:
    """Return what a defense does, and whether it hides what leaks."""
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
        text = "hides it in part at most: no image is exact or recognisable, but parts show"
    elif not tally(under):
        text = "was tried without a result that can be graded"
    elif _is_cut_off(remedy, at_risk):
        text = "hid it from an attack that was cut off"
    else:
        text = "hides it from this attack"
    means = f", by which {remedy.does}," if remedy.does else ""
    return f"{name}{remedy.setting}{means} {text}."


def _besides(remedy: Remedy, at_risk: set[int]) -> str:
    """Return whether a defense still lets originals be told apart, and how often time ran out."""
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
    """Return how much is seen without each defense and with it: of images, if told apart."""
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


def _not_tested(fate: Fates, found: Sequence[Attempt]) -> str:
    """Return which clients and rounds were not attacked, and what no run of this kind tests."""
    attacked = fate.attacked | {a.key[:2] for a in found}
    clients = {client for _, client in attacked}
    rounds = {server_round for server_round, _ in attacked}
    spared = {client for _, client in fate.spared} - clients
    resting = _resting(fate, sorted(rounds))
    missed = [several(sorted(spared))] if spared and min(clients, default=0) >= 0 else []
    missed += [several(resting, "round")] if resting else []
    text = f"{' and '.join(missed)}; " if missed else ""
    text += (
        "longer time limits and stronger attacks; a server that breaks the protocol; "
        "properties of the data"
    )
    if fate.unanswered:
        failed = {client for _, client in fate.unanswered}
        text += f"; {named(failed)} where the attack gave no result"
    return f"{text[0].upper()}{text[1:]} (see What is not covered)."


MEASURED, UNMEASURED = "measured in this run", "not measured in this run"


SEEN = (*LEAKED, "partly")


def _what_to_ask(
    index: Index,
    found: Sequence[Attempt],
    fate: Fates,
    asked: Sequence[Remedy],
    metadata: Mapping[str, Any],
) -> list[Step]:
    """Return three changes that the engineers can be asked for, and the conditions to train on."""
    at_risk = with_grade(found, SEEN)
    options = (_defense(asked), _more_images(index, found, at_risk, fate), _sum(found))
    return [
        Step("Ask the engineers for", " ".join(options)),
        Step(
            "Go on only if",
            "a new run with one of the changes above meets all of these. Even then somebody "
            "who answers for the data has to accept what no run tests (see What is not covered).",
            items=(
                "The new run attacks the smallest clients too, in early and late rounds.",
                f"Its time limit{_seconds(metadata)} ends no attack.",
                "No image has a grade above “nothing”.",
                condition_told(found),
            ),
            note=identifying_told(found),
        ),
    ]


def _seconds(metadata: Mapping[str, Any]) -> str:
    limit = time_limit(metadata)
    return f" (here {limit:g} CPU seconds for an update)" if limit is not None else ""


def _defense(asked: Sequence[Remedy]) -> str:
    tried = "".join(
        f"{remedy.name}{remedy.setting} was {MEASURED}, and {_result(remedy)}; " for remedy in asked
    )
    other = "other settings and defenses" if asked else "any defense"
    return (
        f"(1) A defense on each update: {tried}{other}, such as noise with a privacy budget: "
        f"{UNMEASURED}."
    )


def _result(remedy: Remedy) -> str:
    if with_grade(remedy.under, SEEN):
        return "left leaks"
    if not any(a.grade for a in remedy.under):
        return "gave no result"
    cut_off = _is_cut_off(remedy, {a.key[1] for a in remedy.under})
    return "hid them from an attack that was cut off" if cut_off else HID


def _more_images(index: Index, found: Sequence[Attempt], at_risk: set[int], fate: Fates) -> str:
    sizes = {key[1]: int(r.value) for key, r in index.series("client", "images").items() if r.value}
    whose = [sizes[client] for client in at_risk if client in sizes]
    text = "(2) A larger minimum number of images per client"
    if not whose:
        return f"{text}: {UNMEASURED}."
    text += f" (those that leak had {_span(whose)})"
    graded = {attempt.key[1] for attempt in found if attempt.grade}
    quiet = [sizes[c] for c in graded - at_risk if sizes.get(c, 0) > max(whose)]
    if quiet:
        return f"{text}: of clients with {_span(quiet)} nothing was seen, {MEASURED}."
    attacked = {client for _, client in fate.attacked} | graded
    larger = [c for c in sizes if c not in attacked and sizes[c] > max(whose)]
    why = f", as {several(larger)} had more, but no attack" if larger else ""
    return f"{text}: how many would do was {UNMEASURED}{why}."


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,} to {high:,} images" if low < high else count(low, "image")


def _sum(found: Sequence[Attempt]) -> str:
    measured = MEASURED if any(attempt.key[1] < 0 for attempt in found) else UNMEASURED
    return (
        f"(3) Secure aggregation, so that the server sees only the sum of many updates and no "
        f"single one: {measured}."
    )
