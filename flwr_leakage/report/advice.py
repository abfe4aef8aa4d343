"""Derive the report's advice: whether training may go on as it is, and which steps to take."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    LEAKED,
    SEEN,
    Attempt,
    Fates,
    attempts,
    beyond_chance,
    condition_told,
    ended,
    fates,
    identified,
    labels_inferred,
    labels_right,
    limit_told,
    pool_of,
    seen_of,
    tally,
    time_limit,
    what_if_time_limit,
    worst_by_image,
)
from flwr_leakage.report.commands import is_simulation, rerun
from flwr_leakage.report.index import Index, Step, count, several, span
from flwr_leakage.report.large_clients import better_than_guess
from flwr_leakage.report.membership import members_told
from flwr_leakage.report.remedies import (
    STRONGER,
    Remedy,
    attack_told,
    told_of_time,
    what_it_costs,
)
from flwr_leakage.report.replays import replays
from flwr_leakage.report.story import defense_of, planned_rounds
from flwr_leakage.report.tried import Worth, demanded, more_time, planned_attempts, to_assume, worth
from flwr_leakage.tracking.text import plain_text


class Line(NamedTuple):
    """A short line of the advice.

    Attributes:
        text: the line itself.
        items: alternatives that are listed below ``text``, of which the reader chooses one.
    """

    text: str
    items: tuple[str, ...] = ()


class Advice(NamedTuple):
    """The report's answer to whether training may go on as it is, and the steps to take.

    Attributes:
        headline: the answer in a sentence of at most 20 words.
        lines: the steps to take, in at most five short lines.
        steps: the steps to take at length, with the measurements behind them.
    """

    headline: str
    lines: tuple[Line, ...]
    steps: tuple[Step, ...]

    @property
    def do(self) -> tuple[str, ...]:
        """Return the texts and commands that advise a further run; empty if none is advised."""
        steps = [step for step in self.steps if step.term == "Do"]
        return tuple(line for step in steps for line in (step.text, *step.commands))


def advise(
    index: Index,
    metadata: Mapping[str, Any],
    asked: Sequence[Remedy],
    events: Sequence[RunEvent] = (),
) -> Advice:
    """Return the advice on a run: whether training may go on as it is, and which steps to take.

    ``index`` holds the run's records and ``metadata`` its settings. ``asked`` are the defenses that
    were tried on copies of the run's updates.
    """
    found, fate = attempts(index), fates(index)
    leaking = with_grade(found, LEAKED)
    partly = with_grade(found, ("partly",)) - leaking
    unsure = {client for _, client in replays(index, events).other}
    nothing_seen = worth(index, events, metadata, found, fate)
    each, noun = worst_by_image(found), index.sample
    if leaking:
        what = seen_of(each) if each else f"private {noun.many}"
        headline = f"Not as it is: the server can see {what}, from {_briefly(leaking)}."
    elif partly:
        is_one = sum(attempt.grade == "partly" for attempt in each) == 1
        what = f"parts of {f'a private {noun.one}' if is_one else f'private {noun.many}'}"
        headline = f"Not without a decision: {what} of {_briefly(partly)} can be seen."
    else:
        headline = nothing_seen.headline
    at_risk = leaking | partly
    steps = [_what_helps(index, asked, at_risk, metadata)] if at_risk else []
    steps += what_it_costs(index, asked, metadata, bool(at_risk))
    if leaking or (not partly and nothing_seen.asks_to_pause and nothing_seen.level == "partly"):
        do = _test(nothing_seen, metadata)
    else:
        fold = f"The command that tests more{_without_limits(nothing_seen.commands)}"
        do = Step("Do", nothing_seen.do, commands=nothing_seen.commands, fold=fold)
    is_repeated = bool(do.text and do.commands and (do.term == "Test" or nothing_seen.changes))
    goal = _go_on_if(index, found, metadata, nothing_seen, is_repeated, bool(at_risk))
    if at_risk:
        steps += [goal, do]
    elif nothing_seen.asks_to_pause or nothing_seen.level == "partly":
        steps += [do, goal]
    else:
        steps.append(do)
    lines = _in_short(index, metadata, found, fate, asked, unsure, nothing_seen)
    return Advice(headline, lines, tuple(step for step in steps if step.text))


def _test(wanted: Worth, metadata: Mapping[str, Any]) -> Step:
    """Return the step that advises a new run under a defense.

    ``metadata`` are the settings of the audited run, and ``wanted.changes`` those that differ in
    the new one. The step has a command for the new run if the audited run was a simulation.
    """
    changes = list(wanted.changes)
    if not defense_of(metadata):
        changes.append(f"defense={STRONGER}")
    under = "under a stronger defense" if defense_of(metadata) else f"here under {STRONGER} noise"
    changes = [*demanded(metadata, changes), "what_if=null"] if changes else []
    commands = rerun(metadata, changes) if changes else ()
    limits = _without_limits(commands)
    fold = f"A new run that attacks every client, {under}{limits}"
    return Step("Test", wanted.do if commands else "", commands=commands, fold=fold)


def _without_limits(commands: Sequence[str]) -> str:
    """Return a clause that commands may take hours; empty if none of them lifts a time limit."""
    is_lifted = any("max_seconds=null" in each for each in commands)
    return ", without a time limit (maybe hours an update)" * is_lifted


MAX_LINES, MAX_LINE = 5, 200
"""The largest number of lines of the report's short advice, and of characters in a line: choices of
layout.
"""


def _in_short(
    index: Index,
    metadata: Mapping[str, Any],
    found: Sequence[Attempt],
    fate: Fates,
    asked: Sequence[Remedy],
    unsure: set[int],
    nothing_seen: Worth,
) -> tuple[Line, ...]:
    """Return the advice in short lines.

    A sample is seen if its reconstruction is graded ``exact``, ``recognisable`` or ``partly``. If
    one is seen, the lines list changes to training, one of which is to be tested in a new run. If
    none is seen, the lines follow ``nothing_seen``, the judgement on whether training may go on
    after a run that shows no sample. ``asked`` are the defenses that were tried on copies of the
    run's updates, and ``unsure`` the clients whose training, repeated, does not give the update
    that they sent.
    """
    at_risk = with_grade(found, SEEN)
    lines = []
    if unsure:
        lines.append(f"Mend first: {_briefly(unsure)} trained something else than was sent.")
    if not at_risk:
        return _unseen_in_short(index, metadata, found, asked, lines, nothing_seen)
    stop, condition = "Decide whether such parts may be seen. If not, change it.", "Then go on"
    if with_grade(found, LEAKED):
        stop, condition = "Stop, or leave out who is seen.", "Go on"
        if {client for _, client in fate.spared} - {client for _, client in fate.attacked}:
            left = f"Leaving out {_briefly(with_grade(found, LEAKED))} is not enough"
            stop = f"Stop. {left}: other clients were not attacked."
        elif with_grade(found, LEAKED) == {attempt.key[1] for attempt in found}:
            stop = "Stop: of every client something is seen."
    defense, protection = _changes(metadata, found, asked)
    changes = (defense, _more_images(index, found, at_risk, fate), protection)
    is_raw = bool(ended(index, found))
    assume = to_assume(index, metadata, fate.attacked)
    is_cut_off = is_raw or any(_is_cut_off(each, at_risk) for each in asked)
    then = []
    if assume:
        then = [plain_text(f"In that run, {assume[0].lower()}{assume[1:]}", MAX_LINE)]
    elif is_cut_off:
        then = [_time_then(index, metadata, not is_raw)]
    return (
        *map(Line, (*lines, stop, *_labels_line(index, metadata, found))),
        Line(TEST, changes),
        *map(Line, then),
        Line(_go_on(condition, "the new run")),
    )


TEST = "Test one of these changes in a new run:"


def _changes(
    metadata: Mapping[str, Any], found: Sequence[Attempt], asked: Sequence[Remedy]
) -> tuple[str, str]:
    """Return two texts on changes that a new run can test.

    The first is on a defense of each update, and the second on differential privacy or secure
    aggregation. ``asked`` are the defenses that were tried on copies of the run's updates.
    """
    told = "; ".join(
        f"here {each.name} {_result(each, {a.key[1] for a in each.under})}"
        for each in asked[:MAX_DEFENSES]
    )
    own = defense_of(metadata)
    defense = f"A stronger defense than {own}" if own else "A defense on each update, such as noise"
    if not is_simulation(metadata):
        defense += f": audit(app, defense={'…' if own else 'GaussianNoise(…)'})"
    other = " other one" if own else "ne"
    summed = "measured" if any(attempt.key[1] < 0 for attempt in found) else "not measured"
    return (
        f"{defense}; {told or f'no{other} was measured here'}.",
        f"Differential privacy (dp_sgd), whose ε bounds every attack, or secure aggregation, by "
        f"which the server sees sums only: {summed} here.",
    )


def _unseen_in_short(
    index: Index,
    metadata: Mapping[str, Any],
    found: Sequence[Attempt],
    asked: Sequence[Remedy],
    lines: Sequence[str],
    unseen: Worth,
) -> tuple[Line, ...]:
    """Return the advice in at most five lines (``MAX_LINES``), for a run in which no sample is
    seen.

    A sample is seen if it is graded ``exact``, ``recognisable`` or ``partly``. The texts in
    ``lines`` stand first, ``asked`` are the defenses that were tried on copies of the run's
    updates, and ``unseen`` is the judgement on whether training may go on after such a run.
    """
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", unseen.do) if unseen.do else []
    more = [*lines, *(plain_text(sentence, MAX_LINE) for sentence in sentences)]
    goal = Line(_go_on("Go on", "a new run"))
    is_found, already = unseen.level == "partly", _found(index, found)
    labels = _labels_line(index, metadata, found)
    pause = "Pause the training until a new run can say"
    last: list[Line]
    if unseen.asks_to_pause and is_found:
        change = Line(TEST, _changes(metadata, found, asked))
        lead = Line(f"{pause}. Found already: {already}.")
        return (*(lead, *map(Line, labels), change, *map(Line, more))[: MAX_LINES - 1], goal)
    if unseen.asks_to_pause:
        first = [f"{pause}; nobody knows the risk.", *labels]
        again = f"A new run {_goal()}"
        ways = Line("Go on in one of these ways only:", (again, *_protection(metadata)))
        last = [ways]
    elif is_found:
        first = [f"Decide whether the server may know what was found: {already}.", *labels]
        go_on = _go_on("If it may, go on", "a new run", is_accepted=True)
        ways = Line("If it may not, go on only with one of these:", _protection(metadata))
        last = [Line(go_on), ways]
    else:
        first = labels
        decides = "Whoever answers for the data decides: no run tests all (What is not covered)."
        last = [Line(decides)]
    return (*map(Line, [*first, *more][: MAX_LINES - len(last)]), *last)


def _go_on(condition: str, run: str, is_accepted: bool = False) -> str:
    """Return a line such as “Go on only if the new run meets …”, with the conditions by
    :func:`_goal`.

    ``condition`` are its first words (“Go on”), and ``run`` names the run (“the new run”). With
    ``is_accepted``, the line does not demand that nothing leaks beyond chance.
    """
    return f"{condition} only if {run} {_goal(is_accepted)}"


def _goal(is_accepted: bool = False) -> str:
    """Return in words the conditions that a new run has to meet if training is to go on.

    The conditions are: no sample is seen, nothing else leaks beyond chance, all clients are
    attacked and no attack is cut off by time. With ``is_accepted``, the second one is left out.
    """
    seen = "nothing seen, even in part" + ", or told beyond chance" * (not is_accepted)
    return f"meets the list in The answer at length: {seen}; all clients attacked; none cut off."


def _time_then(index: Index, metadata: Mapping[str, Any], is_what_if: bool) -> str:
    sentence, settings = more_time(index, metadata, is_what_if)
    told = f"In that run, {sentence[0].lower()}{sentence[1:]}"
    return f"{told.removesuffix('.')} ({' '.join(settings)})." if settings else told


def _found(index: Index, found: Sequence[Attempt]) -> str:
    """Return words for the leaks of a run in which no sample is seen.

    The words tell how many originals the reconstructions identify, if that is beyond chance, and
    how many records a membership test found to be used in training. Without either the text is
    empty.
    """
    told = []
    if beyond_chance(found):
        first, ranked = identified(found)
        chance = f"{ranked / pool_of(found):.1g}"
        told.append(f"{first} of {ranked} originals identified (a guess has {chance})")
    if members := members_told(index, with_link=False):
        told.append(members)
    return "; ".join(told)


def _labels_line(index: Index, metadata: Mapping[str, Any], found: Sequence[Attempt]) -> list[str]:
    """Return a line that advises to decide whether the server may know labels; empty if none is
    needed.

    No line is needed if the attacks inferred no more labels than guesses do by chance, and an
    inference of class counts had no more labels of any client right than a guess.
    """
    inferred, told = labels_right(index, found), []
    if inferred and inferred.is_beyond_guess and labels_inferred(index, metadata):
        right = f"{inferred.right} of {inferred.whole} were inferred"
        told.append(f"{right}, and a guess has {inferred.commonest}")
    if better := better_than_guess(index):
        told.append(f"of {_briefly({*better})} more than a guess has")
    if not told:
        return []
    return [
        f"Decide whether labels may be known: {'; '.join(told)}. If not, test a defense that hides "
        f"them."
    ]


def _protection(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return two sentences, on differential privacy and on secure aggregation as protections."""
    sums = "threat=ThreatModel(view='aggregate')"
    if is_simulation(metadata):
        sums = "threat.view=aggregate"
    return (
        "Differential privacy (dp_sgd, by plain SGD), if you accept its ε of all rounds: at 1 what "
        "is sent is at most 2.7 times (e^ε, but for δ) as likely with a record.",
        f"Secure aggregation, by which the server sees sums only, if a new run on sums ({sums}) "
        f"meets the list.",
    )


MAX_DEFENSES = 2
"""The largest number of defenses that a short line of the advice names, a choice of layout."""


def _briefly(clients: set[int]) -> str:
    """Return words for clients: their numbers, or their count if these take over five words. The
    words for −1, the mean of all updates, are “the aggregate”.
    """
    if min(clients) < 0:
        return "the aggregate"
    told = several(sorted(clients), limit=3)
    return told if len(told.split()) <= 5 else count(len(clients), "client")


def with_grade(found: Sequence[Attempt], grades: Sequence[str]) -> set[int]:
    """Return the numbers of the clients with a sample whose reconstruction has one of
    the grades.
    """
    return {attempt.key[1] for attempt in found if attempt.grade in grades}


def _what_helps(
    index: Index, asked: Sequence[Remedy], at_risk: set[int], metadata: Mapping[str, Any]
) -> Step:
    """Return the advice's step on which defenses hide the samples that are seen without them.

    ``asked`` are the defenses that were tried on copies of the updates, and ``at_risk`` the clients
    whose samples are seen.
    """
    own = defense_of(metadata)
    despite = f"It leaks although the run trained under {own}. " if own else ""
    if not asked:
        text = "No other defense was measured on these updates (what_if), so this run names none."
        return Step("Defenses tried", despite + text)
    effects = " ".join(_effect(remedy, at_risk) for remedy in asked)
    notes = [_besides(remedy, at_risk) for remedy in asked]
    note = " ".join(filter(None, (*notes, attack_told(metadata))))
    cut_off = [remedy for remedy in asked if _is_cut_off(remedy, at_risk)]
    if not cut_off:
        return Step("Defenses tried", despite + effects, note=note)
    do, changes = more_time(index, metadata, not ended(index, attempts(index)))
    names = " and ".join(remedy.name for remedy in cut_off)
    why = (
        f"the {limit_told(what_if_time_limit(metadata))} ended the attack on every update under "
        f"{names}, "
        f"and with more time more may show. {do}"
    )
    text = f"Not established: {why} {despite}{effects}"
    if len(cut_off) < len(asked):
        text = f"{despite}{effects} Of {names} it is not established: {why}"
    commands, fold = rerun(metadata, changes), "The command that establishes what a defense does"
    return Step("Defenses tried", text, (), note, commands, fold)


def _is_cut_off(remedy: Remedy, at_risk: set[int]) -> bool:
    """Return whether it is unknown, for lack of time, if a defense hides the samples of
    ``at_risk``.

    That is so if the time limit ended all attacks on these clients' updates under the defense, and
    no sample is seen, even in part.
    """
    ended = [over for (_, client), over in remedy.ended.items() if client in at_risk]
    seen = with_grade(remedy.under, SEEN) & at_risk
    return bool(ended) and all(ended) and not seen


def _effect(remedy: Remedy, at_risk: set[int]) -> str:
    """Return a sentence on whether a defense hides the samples that are seen without it.

    ``at_risk`` are the clients whose samples are seen.
    """
    name = f"{remedy.name[0].upper()}{remedy.name[1:]}"
    if not any(a.key[1] in at_risk for a in remedy.under):
        return f"{name} was not measured on them."
    means = f", by which {remedy.does}," if remedy.does else ""
    return f"{name}{remedy.setting}{means} {_result(remedy, at_risk)}."


def _besides(remedy: Remedy, at_risk: set[int]) -> str:
    """Return a note on a defense under which updates of the clients ``at_risk`` were attacked.

    The note tells how many attempts show a sample, how much the defense changes an update as a
    share of its norm, and how many attacks the time limit ended. The note is empty if none of these
    updates was attacked.
    """
    if not any(a.key[1] in at_risk for a in remedy.under):
        return ""
    both = [[a for a in found if a.key[1] in at_risk] for found in (remedy.before, remedy.under)]
    before, under = (sum(a.grade in LEAKED for a in found) for found in both)
    parts = sum(attempt.grade == "partly" for attempt in both[1])
    seen = (
        f"attempts that show {both[1][0].sample.a}: {under} of {len(both[1])} (without it "
        f"{before}), {parts} in part"
    )
    told = "the change of an update was not recorded"
    if remedy.change is not None:
        size = f"{100 * remedy.change:.0f} % of its size (Euclidean norm, median)"
        told = f"an update changes by {size}, which says little of accuracy"
    ended = {place: over for place, over in remedy.ended.items() if place[1] in at_risk}
    return f"Under {remedy.name}: {seen}; {told}.{told_of_time(ended)}"


def _go_on_if(
    index: Index,
    found: Sequence[Attempt],
    metadata: Mapping[str, Any],
    wanted: Worth,
    is_repeated: bool,
    with_changes: bool,
) -> Step:
    """Return the advice's step with the conditions that a new run has to meet if training is to go
    on.

    ``wanted`` is the judgement on this run, with the settings of the new run. ``is_repeated`` tells
    whether the new run repeats this simulation by a command in the advice, and ``with_changes``
    whether it makes one of the changes that the advice lists.
    """
    limit = time_limit(metadata)
    seconds = f" (here {limit:g} CPU seconds for an update)" if limit is not None else ""
    is_single = planned_rounds(metadata) == 1 or {*index.rounds("attack", "client")} == {1}
    more = ", so over more rounds than the one of this run" * (is_single and not is_repeated)
    settings = demanded(metadata, wanted.changes)
    planned = planned_attempts(index, metadata, settings) if is_repeated else None
    labels = labels_inferred(index, metadata) or better_than_guess(index)
    protects = wanted.asks_to_pause and wanted.level != "partly" and not with_changes
    return Step(
        "Go on only if",
        f"a new run{' with one of the changes above' * with_changes} meets all of these"
        f"{', or in one of the other ways under What to do' * protects}. Even then somebody who "
        f"answers for the data has to accept what no run tests (see What is not covered).",
        items=(
            f"The new run attacks every client, in early and late rounds{more}.",
            f"No time limit ends an attack: neither the run's{seconds} nor the attack's own.",
            f"No {index.sample.one} has a grade above “nothing”.",
            condition_told(found, planned),
            "The attack's answer explains each update. Where a defense's noise keeps it from that, "
            "a run shows little, and only a bound counts, such as ε.",
            *(["No more labels are inferred than by chance, or they may be known."] * bool(labels)),
        ),
    )


def _result(remedy: Remedy, clients: set[int]) -> str:
    """Return words for the effect of a defense on the samples of ``clients``."""
    under = [attempt for attempt in remedy.under if attempt.key[1] in clients]
    if with_grade(under, SEEN):
        return "left leaks" if with_grade(under, LEAKED) else "let parts show"
    if not tally(under):
        return "gave no result"
    if _is_cut_off(remedy, clients):
        return "hid them from an attack that was cut off"
    return "hid them from this attack"


def _more_images(index: Index, found: Sequence[Attempt], at_risk: set[int], fate: Fates) -> str:
    sizes = {key[1]: int(r.value) for key, r in index.series("client", "images").items() if r.value}
    whose = [sizes[client] for client in at_risk if client in sizes]
    noun = index.sample
    text = f"More {noun.many} per client"
    if not whose:
        return f"{text}: not measured here."
    text += f" (those seen had {span(whose, noun)})"
    graded = {attempt.key[1] for attempt in found if attempt.grade}
    quiet = {c for c in graded - at_risk if sizes.get(c, 0) > max(whose)}
    sure = quiet - {client for _, client in ended(index, found)}
    if quiet:
        large = span([sizes[client] for client in sure or quiet], noun)
        but = "" if sure else ", but time cut the attack off"
        return f"{text}: of clients with {large} nothing was seen here{but}."
    attacked = {client for _, client in fate.attacked} | graded
    larger = {c for c in sizes if c not in attacked and sizes[c] > max(whose)}
    were = "was" if len(larger) == 1 else "were"
    why = f", as {_briefly(larger)}, with more, {were} not attacked" if larger else ""
    large = f" (what-ifs: see Clients of many {index.sample.many})"
    tried = large if index.names("probe") else ""
    return f"{text}: how many are enough was not measured here{why}{tried}."
