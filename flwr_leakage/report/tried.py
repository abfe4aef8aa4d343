"""Judge whether training may go on after a run that shows no sample, and what to run next."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from flwr_leakage.capture import TOLERANCE
from flwr_leakage.measurements import KEPT_FOR_LATER
from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    Attempt,
    Fates,
    Place,
    beyond_chance,
    ended,
    has_converged,
    limit_told,
    otherwise_told,
    single_attack,
    time_limit,
    trained_otherwise,
    unexplained,
    what_if_time_limit,
    wrongly_attacked,
)
from flwr_leakage.report.commands import is_simulation, rerun
from flwr_leakage.report.index import Index, count, grouped, section, several, values
from flwr_leakage.report.membership import members_told
from flwr_leakage.report.replays import replays
from flwr_leakage.report.story import is_defended
from flwr_leakage.tracking.text import plain_text

_Of = Callable[[Collection[Place]], str]  # how many of the attacked updates, in words


MAX_REASON = 400
"""The largest number of characters that the report's answer quotes of a reason why an update tells
nothing, a choice of layout. The events have the whole reason.
"""


@dataclass(frozen=True)
class Worth:
    """The judgement on whether training may go on after a run that shows no sample, even in part.

    Attributes:
        answer: whether training may go on, in a sentence or two.
        headline: the answer in a sentence of at most 20 words.
        level: ``quiet`` if the strongest attack ended by itself on some update and found nothing;
            ``partly`` if originals are identified beyond chance or records found to be used; else
            ``unknown``.
        do: sentences that advise further runs to learn more; empty if no run would help.
        commands: the commands of these further runs, if the run was a simulation.
        changes: the settings by which these commands differ from the run's own.
        unsure: attacked updates of which nothing can be said, by (round, client), with the reason.
        is_sure: whether something can be said of at least one attacked update.
    """

    answer: str
    headline: str
    level: Literal["partly", "quiet", "unknown"]
    do: str
    commands: tuple[str, ...]
    changes: tuple[str, ...] = ()
    unsure: Mapping[Place, str] = field(default_factory=dict)
    is_sure: bool = True

    @property
    def asks_to_pause(self) -> bool:
        """Return whether training should pause until a new run says more."""
        return self.level == "unknown" or not self.is_sure


class _Doubt(NamedTuple):
    """A reason why nothing can be said of some updates, with the way to remove it.

    Attributes:
        places: the (round, client) of the updates; none where they were not attacked at all.
        told: the reason, as a clause.
        do: sentences that advise how to remove the doubt.
        changes: the settings with which a new simulation removes it.
        command: a command that removes it without a new simulation; empty if there is none.
    """

    places: Collection[Place]
    told: str
    do: str = ""
    changes: tuple[str, ...] = ()
    command: str = ""


def worth(
    index: Index,
    events: Sequence[RunEvent],
    metadata: Mapping[str, Any],
    found: Sequence[Attempt],
    fate: Fates,
) -> Worth:
    """Return the judgement on whether training may go on after a run whose attacks show no sample.

    ``found`` tells the outcome for each attacked sample, and ``fate`` which updates were attacked.
    """
    attacked = fate.attacked | {attempt.key[:2] for attempt in found}
    graded = {attempt.key[:2] for attempt in found if attempt.grade}
    kept = _kept(events, metadata, attacked)
    left_out = _left_out(fate, attacked, metadata, bool(kept))
    members = members_told(index, with_link=False)
    if not attacked:
        why = "no attack was run, or none has ended yet"
        nothing = [_Doubt((), why, *_run_strongest(metadata))]
        if not is_simulation(metadata):
            wait = "The attacks of a round are recorded once all of them have ended."
            nothing = [_Doubt((), why, f"{wait} Let one round end, or lower max_seconds=.")]
        doubts = [*kept, *left_out] or _broken(events) or nothing
        told = " ".join(f"{doubt.told[0].upper()}{doubt.told[1:]}." for doubt in doubts)
        answer = f"This run cannot say: no update was attacked. {told} That is no sign of safety."
        more, commands, changes = _all(doubts, metadata)
        inferred = values(index.series("labels", "expected_right"))
        by_labels = [_by_labels(index.sample.many)] if inferred else []
        why = "updates were kept, and are not attacked yet" if kept else "no update was attacked"
        headline = f"This run cannot say: {why}."
        more = " ".join([*by_labels, more]).strip()
        if members:
            headline = f"Not without a decision: {members}; {why}."
            answer = f"Not without a decision: {members}. No update was attacked. {told}"
            return Worth(answer, headline, "partly", more, commands, changes)
        return Worth(answer, headline, "unknown", more, commands, changes)
    of = partial(_of, attacked=len(attacked))
    single, replayed = single_attack(index, metadata), replays(index, events)
    others = graded & replayed.other.keys()
    wrong = wrongly_attacked(index, attacked)
    ungraded = _ungraded(attacked - graded - fate.unanswered.keys(), found, metadata, of)
    doubts = [
        _otherwise(index, wrong, metadata),
        *([ungraded] if not graded else []),  # more time does not make these answers gradable
        _Doubt(
            graded if single else (),
            f"only {single} was tried, and a stronger one applies",
            *_run_strongest(metadata),
        ),
        _cut_off(index, found, wrong, metadata, of),
        _failed(fate, metadata, of),
        _unexplained(unexplained(index).keys() - replayed.same.keys() - wrong, metadata, of),
        _Doubt(others, "what was attacked is not what the clients trained (replay check)"),
        *([ungraded] if graded else []),
        _missed(
            graded & replayed.same.keys() & unexplained(index, TOLERANCE**2).keys()
            - (ended(index, found) | wrong | fate.unanswered.keys()),
            index, metadata, of,
        ),
    ]  # fmt: skip
    doubts = [doubt for doubt in doubts if doubt.places]
    unsure = {place: doubt.told for doubt in reversed(doubts) for place in doubt.places}
    sure = attacked - unsure.keys()
    told = "; ".join(doubt.told for doubt in doubts)
    do = _all([*kept, *doubts, *left_out], metadata)
    if beyond_chance(found):
        ruling, shows = "Not without a decision", f"no {index.sample.one} shows"
        if not sure:
            ruling = "Not yet"
            shows = f"this run cannot say whether {index.sample.many} show"
        answer = (
            f"{ruling}. {shows[0].upper()}{shows[1:]}{f': {told}' * bool(told)}. Yet the "
            f"reconstructions point to their originals more often than chance does: something "
            f"leaks."
        )
        headline = f"{ruling}: {shows}, yet originals are identified more often than by chance."
        return Worth(answer, headline, "partly", *do, unsure, bool(sure))
    if members:
        headline = f"Not without a decision: {members}, though no {index.sample.one} shows."
        if not sure:
            headline = f"Not yet: {members}; this run cannot say whether {index.sample.many} show."
        answer = f"{headline} Of the attacks: {told}." if told else headline
        return Worth(answer, headline, "partly", *do, unsure, bool(sure))
    if not sure:
        but = f"no {index.sample.one} was recovered, but " * bool(graded)
        answer = f"This run cannot say: {but}{told}. That is no sign of safety."
        headline = f"This run cannot say: {doubts[0].told.partition(' (')[0]}."
        return Worth(answer, headline, "unknown", *do, unsure)
    tried = f"{len(sure)} of {len(attacked)} attacked updates" if told else "the updates it tried"
    answer = (
        f"This run found no reason to stop, and gives no clearance: this attack recovered nothing "
        f"from {tried}. Others may."
    )
    headline = f"No reason to stop was found, and no clearance: this attack saw nothing in {tried}."
    if weak := sure & unexplained(index).keys():
        answer += (
            f" Its answer does not explain {of(weak)}: what the defense changed may be why, or the "
            f"search."
        )
    answer += f" Of the rest it cannot say: {told}." * bool(told)
    return Worth(answer, headline, "quiet", *do, unsure)


_INPUTS = ("inputs of shape", "normalisation by", "BatchNorm in mode")
_LOSS = ("the cross-entropy with", "a loss that is not the mean")
_STEPS = ("learning rate", "momentum", "weight decay", "steps", "batch size")
"""The first words of differences between a client's training and the attack's assumption. An attack
with another ``spec`` or model removes differences in ``_INPUTS`` (the inputs and BatchNorm), one
with the clients' loss removes those in ``_LOSS``, and one with another ``schedule`` removes those
in ``_STEPS`` (the local steps).
"""

MAX_REST = 3
"""The largest number of differences in training that a sentence names, a choice of layout. These
differences are from the attack's assumptions, and no setting of the attack removes them.
"""


def _otherwise(index: Index, places: Collection[Place], metadata: Mapping[str, Any]) -> _Doubt:
    """Return the doubt that updates were attacked under wrong assumptions, with the way to remove
    it.

    ``places`` are the (round, client) of these updates. If there are none, the doubt is empty.
    """
    if not places:
        return _Doubt((), "")
    summed = {server_round for server_round, client in places if client < 0}
    said = trained_otherwise(index).items()
    told = [other for place, other in said if place in places or place[0] in summed]
    each = [setting for other in told for setting in other.split("; ")]
    app = not is_simulation(metadata)
    or_leave = ", or leave it out, so that each client’s own is used" * (not is_defended(metadata))
    do = []
    if any(setting.startswith(_STEPS) for setting in each):
        do.append(
            f"Set schedule= of observe(…) to what clients trained with{or_leave}."
            if app else "Set the run’s local training to what clients trained with."
        )  # fmt: skip
    if any(setting.startswith(_INPUTS) for setting in each):
        do.append(
            f"Set spec= of observe(…) to the clients’ inputs and give it the model "
            f"itself{or_leave}."
            if app else "Set the run’s dataset and BatchNorm mode to those of the clients."
        )  # fmt: skip
    if any(setting.startswith(_LOSS) for setting in each):
        do.append("Give observe(…) the clients’ loss beside the model: GradientMap(model, loss).")
    rest = dict.fromkeys(
        setting.partition(", assumed ")[0] for setting in each
        if not setting.startswith((*_STEPS, *_INPUTS, *_LOSS))
    )  # fmt: skip
    if rest:
        do.append(
            f"No attack here assumes {' or '.join(list(rest)[:MAX_REST])}: test a trial run of the "
            f"same training by plain SGD without it."
        )
    return _Doubt(places, otherwise_told(index, places), " ".join(do))


def to_assume(index: Index, metadata: Mapping[str, Any], attacked: Collection[Place]) -> str:
    """Return advice on how to attack updates under the training that their clients told of.

    ``attacked`` are the (round, client) of the updates. The text is empty if no client told of
    another training than was assumed.
    """
    return _otherwise(index, wrongly_attacked(index, attacked), metadata).do


def _by_labels(noun: str) -> str:
    """Return advice, for a run that only inferred labels, on which results decide whether to go on.

    ``noun`` is the plural for samples.
    """
    return (
        f"Decide by what the updates tell of the labels, and by what one step on a few {noun} "
        f"would show (Clients of many {noun}). Where class counts are private themselves, as "
        f"diagnoses are, test a defense that hides them."
    )


def _all(
    doubts: Sequence[_Doubt], metadata: Mapping[str, Any]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return how to remove doubts, which are reasons why nothing can be said of some updates.

    The result has sentences, shell commands, and the settings in which the commands differ from the
    run's own. If updates were kept for a later attack, the only command attacks these. If no
    setting helps, there is no command.
    """
    if doubts and doubts[0].command:
        return doubts[0].do, (doubts[0].command,), ()
    do = " ".join(dict.fromkeys(doubt.do for doubt in doubts if doubt.do))
    changes = tuple(dict.fromkeys(each for doubt in doubts for each in doubt.changes))
    return do, rerun(metadata, demanded(metadata, changes)) if changes else (), changes


def demanded(metadata: Mapping[str, Any], changes: Sequence[str]) -> tuple[str, ...]:
    """Return ``changes`` to a simulation's settings, and further ones that a repetition needs.

    With all these settings, no time limit of the run or the attack ends an attack, and at least two
    rounds are attacked. Each change is a Hydra override such as ``num_rounds=5``.
    """
    config, every = section(metadata, "config"), dict.fromkeys(changes)
    if section(config, "server").get("attack_max_seconds") is not None:
        every["server.attack_max_seconds=null"] = None
    is_other = "attack=strongest" in changes  # this preset has a time limit of its own
    if is_other or section(config, "attack").get("max_seconds") is not None:
        every["attack.max_seconds=null"] = None
    if config.get("num_rounds") == 1:
        first, step = _plan(metadata, changes)[1:]
        every[f"num_rounds={first + step}"] = None  # the fewest in which two rounds are attacked
    return tuple(every)


def _plan(metadata: Mapping[str, Any], changes: Sequence[str]) -> tuple[int, int, int]:
    """Return three numbers of a simulation that is repeated with ``changes`` to its settings.

    They are the number of rounds, the first attacked round, and the number of rounds from one
    attack to the next.
    """
    new = dict(each.split("=", 1) for each in changes)
    selection = section(metadata, "config", "selection")

    def value(name: str, own: object) -> int:
        if name in new:
            return int(new[name])
        return own if isinstance(own, int) and own > 0 else 1

    return (
        value("num_rounds", section(metadata, "config").get("num_rounds")),
        value("selection.first", selection.get("first")),
        value("selection.every", selection.get("every")),
    )


def planned_attempts(
    index: Index, metadata: Mapping[str, Any], changes: Sequence[str]
) -> tuple[int, int] | None:
    """Return the numbers of all clients' samples and of attacked rounds of a repeated simulation.

    The samples are those used in a round. The simulation is repeated with ``changes`` to its
    settings, and attacks all clients. The result is ``None`` if the run was no simulation, or if
    rounds differ in their clients or are attacked together.
    """
    sizes: dict[int, dict[int, float]] = {}
    for (when, client, _), record in index.series("client", "images").items():
        sizes.setdefault(when, {})[client] = record.value or 0.0
    held, *others = sizes.values() or [{}]
    joint = section(metadata, "config", "threat").get("rounds", 1)
    if not is_simulation(metadata) or not held or joint != 1 or any(e != held for e in others):
        return None
    rounds, first, every = _plan(metadata, changes)
    attacked = len(range(first, rounds + 1, every))
    return (int(sum(held.values())), attacked) if attacked else None


MORE = 10
"""The factor by which the attack in a user's app is advised to get more time than it took. The
value is a choice.
"""


def more_time(
    index: Index, metadata: Mapping[str, Any], is_what_if: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Return sentences that advise to give attacks more time, and the config overrides that do so.

    With ``is_what_if``, only attacks on copies of updates under another defense were cut off by
    time, and are given the time of attacks on sent updates.
    """
    but = "" if is_what_if else _beyond_time(index, metadata)
    limit, less = time_limit(metadata), what_if_time_limit(metadata)
    if is_what_if and is_simulation(metadata) and less != limit:
        time = "as much as it takes" if limit is None else f"{limit:g} CPU seconds an update"
        told = f"Give the attack under a defense the time that it has without one, {time}."
        return told, ("server.what_if_max_seconds=null",)
    own = section(metadata, "config", "attack").get("max_seconds")
    server = section(metadata, "config", "server")
    has_what_if = bool(section(metadata, "config", "what_if"))
    limited = has_what_if and server.get("what_if_max_seconds") is not None
    asked = ("server.what_if_max_seconds=null",) * limited
    spent, attacks = _spent(index, metadata)
    here = f" (here {count(attacks, 'attack')} took {duration(spent)})" if spent else ""
    if not is_simulation(metadata):
        if not spent:
            app = "observe(…, max_seconds=600, max_round_seconds=None)"
            return f"Give the attack more time, here ten minutes an update: {app}{but}.", ()
        each = math.ceil(MORE * spent / attacks / 10) * 10
        app = f"observe(…, max_seconds={each}, max_round_seconds=None)"
        cost = f"Such a run attacks for up to {duration(each * attacks)}{here}."
        return f"Give the attack more time: {app}{but}. {cost}", ()
    own_limit = ("attack.max_seconds=null",) * (own is not None)
    changes = ("server.attack_max_seconds=null", *asked, *own_limit)
    told = f"Give the attack all the time it takes, maybe hours an update{here}{but}."
    return told, changes


_TOO_LARGE = re.compile(r" refused \([^()]* may have \d+ entries, it has \d+\)")
"""The pattern of words in a record's note that say that one of the tried attacks was refused, as
the problem was too large.
"""


def _beyond_time(index: Index, metadata: Mapping[str, Any]) -> str:
    """Return a clause on the updates cut off by time for which more time may change nothing.

    More time is no help where one of the tried attacks was refused for the problem's size, or where
    the chosen answer had converged and a defense's noise may explain the rest. The clause is empty
    if there is no such update.
    """
    stopped = {key[:2] for key in index.series("attack", "stopped_by_budget")}
    told = index.series("attack", "objective").items()
    notes = [record.note for key, record in told if key[:2] in stopped]
    parts = []
    if any(map(_TOO_LARGE.search, notes)):
        parts.append("a part was refused for its size")
    if is_defended(metadata) and any(map(has_converged, notes)):
        parts.append("an answer converged (the rest may be noise)")
    return f"; time is no cure where {' or '.join(parts)}" if parts else ""


def _spent(index: Index, metadata: Mapping[str, Any]) -> tuple[float, int]:
    """Return the CPU seconds of all attacks on the run's updates, and the number of attacks.

    The seconds are 0 if they were not recorded, as for attacks in worker processes.
    """
    workers = section(metadata, "config", "server").get("attack_workers", 1)
    spent = sum(values(index.series("cost", "attack_cpu_seconds"))) if workers == 1 else 0.0
    return spent, len({key[:2] for key in index.series("attack", "objective")})


def duration(seconds: float) -> str:
    """Return CPU seconds as text in the largest suitable unit.

    Example:
        >>> duration(0.651), duration(42.3), duration(540), duration(9000)
        ('less than 1 CPU second', '42 CPU seconds', '9 CPU minutes', '2.5 CPU hours')
    """
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g} CPU {name}"
    return count(round(seconds), "CPU second") if seconds >= 1 else "less than 1 CPU second"


def _run_strongest(metadata: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return a sentence on how to try all attacks in a new run, and the config override for that.

    The override, ``attack=strongest``, is for the command of a simulation.
    """
    how = "attack=strongest" if is_simulation(metadata) else 'observe(…, attack="strongest")'
    return (
        f"Run it again with {how}: it tries every attack that applies, keeps the best result, and "
        f"tells which do not apply, and why.",
        ("attack=strongest",),
    )


def _cut_off(
    index: Index,
    found: Sequence[Attempt],
    wrong: Collection[Place],
    metadata: Mapping[str, Any],
    of: _Of,
) -> _Doubt:
    """Return the doubt that the time limit ended attacks, with the advice to give them more time.

    There is no advice if all these updates are in ``wrong``: the attack assumed another training
    than their clients told of, which time does not mend. If the answers to all these updates had
    converged, and a defense may have changed what was sent, the doubt is that this change keeps
    every answer from explaining the update. ``of`` returns words such as
    ``2 of 3 attacked updates``.
    """
    places, limit = ended(index, found), limit_told(time_limit(metadata))
    told = f"the {limit} ended the attack on {of(places)}"
    if places <= set(wrong):
        return _Doubt(places, told)
    notes = index.series("attack", "objective").items()
    settled = {key[:2] for key, record in notes if has_converged(record.note)}
    if is_defended(metadata) and places <= settled:
        told = (
            f"what the defense changed may keep every answer from explaining {of(places)} (the "
            f"answers converged, and the {limit} ended the other attacks)"
        )
        return _Doubt(places, told, *_bounds(metadata))
    return _Doubt(places, told, *more_time(index, metadata))


def _bounds(metadata: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return sentences on how to learn more where a defense keeps answers from explaining updates.

    The second entry has the config overrides that add bounds to a simulation whose defense is
    noise. It is empty for other runs.
    """
    time = "More time may change nothing where the answers converged."
    noise = any("noise" in name for name in section(metadata, "config", "defense"))
    if is_simulation(metadata) and noise:
        return (
            f"{time} Bounds (score=bounds) tell what no attacker of their class gets beyond, "
            f"where the noise is Gaussian."
        ), ("score=bounds",)
    return (
        f"{time} A simulation of the training without the defense tells what the defense has to "
        f"hide."
    ), ()


def _failed(fate: Fates, metadata: Mapping[str, Any], of: _Of) -> _Doubt:
    """Return the doubt that the attack could not be applied to some updates, with the way to remove
    it.

    ``fate`` tells which updates these are, and why. ``of`` returns words such as
    ``2 of 3 attacked updates``.
    """
    reasons = {place: why for place, why in fate.unanswered.items() if place not in fate.cut_off}
    why = next(filter(None, reasons.values()), "no reason was recorded")
    told = f"the attack could not be applied to {of(reasons)} (the reason: {_short(why)})"
    do, changes = _run_strongest(metadata)
    if metadata.get("attack") == "strongest":
        changes = ()
        do = (
            "None of the attacks here applies to such updates, so that they cannot be tested as "
            "they are. What each attack needs is told by flwr-leakage list attack. A trial run in "
            "which the training meets that says what such samples leak there."
        )
    return _Doubt(reasons, told, do, changes)


def _unexplained(places: Collection[Place], metadata: Mapping[str, Any], of: _Of) -> _Doubt:
    """Return the doubt that the attack's answers do not reproduce the updates ``places``.

    The advice is to compare clients' training with the attack's assumptions. No update is named if
    ``metadata`` tells of a defense, which may be the cause. ``of`` returns words such as
    ``2 of 3 attacked updates``.
    """
    return _Doubt(
        () if is_defended(metadata) else places,
        f"the attack’s answer does not explain {of(places)}",
        "Compare what clients do with what the attack assumes: optimizer, learning rate, steps, "
        "loss. An update of another optimizer than SGD, such as Adam, is explained by no attack "
        "here; a trial run of the same training by SGD can be tested.",
    )


def _missed(
    places: Collection[Place], index: Index, metadata: Mapping[str, Any], of: _Of
) -> _Doubt:
    """Return the doubt that the attack failed to find samples that reproduce the updates
    ``places``.

    The attack ended by itself, and its answers do not reproduce the updates as closely as repeating
    the training does. No update is named if ``metadata`` tells of a defense. ``of`` returns words
    such as ``2 of 3 attacked updates``.
    """
    return _Doubt(
        () if is_defended(metadata) else places,
        f"the attack found nothing that explains {of(places)}, though the clients’ own "
        f"{index.sample.many} do",
        f"Without a defense an update is explained by its {index.sample.many}, to rounding, and "
        f"the attack’s answer does not explain it: the search failed, which says nothing of what "
        f"the update holds. Treat such updates as open to a better attack, or protect them by "
        f"differential privacy or secure aggregation.",
    )


def _ungraded(
    places: Collection[Place], found: Sequence[Attempt], metadata: Mapping[str, Any], of: _Of
) -> _Doubt:
    """Return the doubt that the answers to the updates ``places`` have no grade.

    The originals, or the guesses without the update, with which answers are compared, are unknown.
    ``of`` returns words such as ``2 of 3 attacked updates``.
    """
    told = f"nothing tells how near the reconstructions of {of(places)} are to the originals"
    if any(attempt.psnr is not None for attempt in found if attempt.key[:2] in places):
        told = "no blind guess to compare with was recorded, so that there are no grades"
    app = "audit(app, truth=FOLDER) and observe(…, truth=FOLDER)"
    truth = "" if is_simulation(metadata) else f": {app}"
    return _Doubt(
        places, told,
        "Look at the reconstructions: what looks private may be. To grade them, simulate the same "
        f"training with data whose originals may be used{truth}.",
    )  # fmt: skip


def _of(places: Collection[Place], attacked: int) -> str:
    """Return words such as ``2 of 3 attacked updates``.

    ``places`` are the (round, client) of the updates, and ``attacked`` is the number of all
    attacked updates.
    """
    if len(places) < attacked:
        return f"{len(places)} of {attacked} attacked updates"
    return "the attacked update" if attacked == 1 else f"all {attacked} attacked updates"


def _kept(
    events: Sequence[RunEvent], metadata: Mapping[str, Any], attacked: Collection[Place]
) -> list[_Doubt]:
    """Return the doubt that updates were kept for a later attack, with the command that attacks
    them.

    The list is empty if all kept updates were attacked. ``events`` tell the rounds of kept updates,
    and ``attacked`` holds the (round, client) of attacked ones.
    """
    rounds = {e.server_round for e in events if e.message.endswith(KEPT_FOR_LATER)}
    rounds -= {server_round for server_round, _ in attacked}
    if not rounds:
        return []
    folder = str(section(metadata, "config").get("run_dir"))
    folder = folder if re.fullmatch(r"~?[\w./][\w./-]*", folder) else "RUN_FOLDER"
    model = "" if is_simulation(metadata) else " --model MODULE:NAME"
    told = f"the updates of {several(sorted(rounds), 'round')} were kept, and are not attacked yet"
    do = "Attack what was kept: the results are added to this run and its report."
    return [_Doubt((), told, do, command=f"flwr-leakage attack-kept {folder}{model}")]


def _broken(events: Sequence[RunEvent]) -> list[_Doubt]:
    """Return the doubt that errors or warnings kept all updates from being attacked; an empty list
    if there were no errors and warnings.
    """
    broken = [e for e in events if e.level != "info" and (e.server_round or e.level == "error")]
    if not broken:
        return []
    first = _short(min(broken, key=lambda e: e.level).message)
    number = count(len(broken), "error or warning", "errors and warnings")
    told = f"there were {number} (see Events), such as “{first}”"
    return [
        _Doubt((), told, "Mend what it names, then run it again: what never came is not tested.")
    ]


class _Setting(NamedTuple):
    """A setting because of which an update was not attacked.

    Its entries are a pattern of the recorded reason, the config overrides by which a simulation
    attacks the update, the argument that does so in a user's app, and a clause on what follows.
    """

    reason: str
    changes: tuple[str, ...] = ()
    app: str = ""
    then: str = ""


_SETTINGS = (
    _Setting("no attack is configured", ("attack=strongest",), 'attack="strongest"',
             "every attack that applies is tried then, and the best result kept"),
    _Setting("more than (the .* attacked at most|max_samples=)", ("selection.max_examples=null",),
             "max_samples=None", "larger updates are attacked then, each of which takes longer"),
    _Setting("attacks run .*from round", ("selection.every=1", "selection.first=1"),
             "selection=Selection()", "every round is attacked then"),
    _Setting("the client was not selected", ("selection.clients=null",), "selection=Selection()",
             "every client is attacked then"),
    _Setting("clients are attacked in a round", ("selection.max_clients=null",),
             "selection=Selection()", "every client of a round is attacked then"),
    _Setting("max_seconds=", ("server.attack_max_seconds=null",), "max_seconds=None",
             "the attack then has no limit of the run, and may take hours for each update"),
    _Setting("CPU seconds were spent on others", (), "max_round_seconds=None",
             "every client of a round is attacked then, however long that holds up the training"),
    _Setting("the optimizer is", (), "spec=…, schedule=LocalSchedule(…)",
             "the attack assumes plain SGD then, which explains a part at most; a trial run by "
             "SGD says more"),
    _Setting("tells neither its steps", (), "spec=…, schedule=…",
             "that is what the attack assumes then; or let clients tell, by share='training'"),
    _Setting("told nothing of its training", (), "spec=…, schedule=…",
             "that is what the attack assumes then; or write app = audit(app) on the clients"),
    _Setting("max_bytes=|MB of intermediate results", (), "max_bytes=None",
             "an attack takes as much memory then as it needs"),
)  # fmt: skip
"""The settings because of which an update is not attacked, each with the pattern of the reason that
is recorded for it."""


RESTING = "attacks run "
"""The first words of the reason why a whole round was not attacked. A client's own reason says
more, and replaces this one.
"""


def _left_out(
    fate: Fates, attacked: Collection[Place], metadata: Mapping[str, Any], is_kept: bool
) -> list[_Doubt]:
    """Return a doubt for each reason why clients or the last round were never attacked, with the
    settings by which a new run attacks them. ``attacked`` holds (round, client). With ``is_kept``,
    updates were kept to be attacked later, and rounds without attacks give no doubt.
    """
    met, reasons = {client for _, client in attacked}, {}
    for (_, client), why in sorted(fate.spared.items(), key=lambda s: not s[1].startswith(RESTING)):
        if client not in met and not (is_kept and why.startswith(RESTING)):
            reasons[client] = _short(why)
    doubts = []
    for setting, clients in grouped((_setting(reasons[c]), c) for c in sorted(reasons)).items():
        whom, one, why = several(clients), len(clients) == 1, reasons[clients[0]]
        told = f"{whom} {'was' if one else 'were'} not attacked: {why}"
        told += f" (client {clients[0]})" * (not one)
        ways = [f"set {' '.join(setting.changes)}"] if setting.changes else []
        if not ways or not is_simulation(metadata):
            ways.append(f"observe(…, {setting.app})")
        do = f"For {whom}: {' or, in an app of your own, '.join(ways)}; {setting.then}."
        if not setting.then:
            do = f"Mend what kept {whom} from being attacked: {why}."
        doubts.append(_Doubt((), told, do, setting.changes))
    last = max((r for (r, _), why in fate.spared.items() if why.startswith(RESTING)), default=0)
    if attacked and not is_kept and last > max(server_round for server_round, _ in attacked):
        step = max(last - 1, 1)
        way = f"set selection.every={step}"
        if not is_simulation(metadata):
            way = f"observe(…, selection=Selection(every={step}))"
        told, do = f"round {last} was not attacked", f"Attack round {last} too: {way}."
        doubts.append(_Doubt((), told, do, (f"selection.every={step}",)))
    return doubts


def _setting(why: str) -> _Setting:
    known = (setting for setting in _SETTINGS if re.search(setting.reason, why))
    return next(known, _Setting(why))


def _short(reason: str) -> str:
    return plain_text(reason, MAX_REASON).rstrip(".")
