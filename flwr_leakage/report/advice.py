"""What to do now: what the numbers of a run say for and against going on as it is.

It is derived from what was measured, and promises nothing beyond that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binom

from flwr_leakage.report.attempts import (
    LEAKED,
    Attempt,
    Fates,
    attempts,
    does,
    fates,
    grouped_by_client,
    most_at_risk_first,
    tally,
)
from flwr_leakage.report.header import describe
from flwr_leakage.report.index import Index, by_round, count, median
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.replays import replays
from flwr_leakage.report.words import graded, several

MAX_CLIENTS = 4
SURE = 0.01
"""A share of identified originals that chance reaches more rarely is no chance."""


@dataclass(frozen=True)
class Step:
    """One thing to know or to do.

    Attributes:
        term: what it is about, in a word or two.
        text: in plain sentences.
    """

    term: str
    text: str


@dataclass(frozen=True)
class Advice:
    """Whether training may go on as it is, as far as this run can tell.

    Attributes:
        answer: in a sentence or two.
        steps: who is at risk, what was seen to help, what it costs, what was not tested.
    """

    answer: str
    steps: tuple[Step, ...]


def advise(index: Index, metadata: Mapping[str, Any], asked: Sequence[Remedy]) -> Advice:
    """Derive the advice from the records, and from the metadata the defense of the run."""
    found, fate = attempts(index), fates(index)
    leaking = _with_grade(found, LEAKED)
    partly = _with_grade(found, ("partly",)) - leaking
    told = [a for a in found if a.grade]
    unsure = {client for _, client in replays(index).other}
    if leaking:
        answer = (
            f"Not as it is. What {_several(leaking)} {_verb(leaking, 'sends', 'send')} lets the "
            f"server see private images, without breaking the protocol."
        )
    elif partly:
        answer = (
            f"Not without a decision. Parts of private images of {_several(partly)} can be seen "
            f"from what the server receives, and a stronger attack may show more."
        )
    elif not told:
        return _unknown(fate, found)
    elif {a.key[1] for a in told} <= unsure:
        answer = (
            "This run cannot say. Nothing was recovered, but what was attacked is not what the "
            "clients trained (replay check): that is no evidence of safety."
        )
    elif beyond_chance(found):
        answer = (
            "Not without a decision. No image shows, yet the reconstructions point to their "
            "originals more often than chance does: something leaks."
        )
    else:
        answer = (
            "This run found no reason to stop, and gives no clearance: this attack recovered "
            "nothing from the updates that it tried. Others may."
        )
    at_risk = leaking or partly
    steps = [
        *_who(found, leaking | partly, index),
        *_replay(unsure),
        *_help(asked, at_risk, metadata),
        *_price(index, asked, metadata, bool(at_risk)),
        _untested(fate, found),
    ]
    return Advice(answer, tuple(steps))


def beyond_chance(found: Sequence[Attempt]) -> bool:
    """Whether originals are identified more often than a guess among the candidates does."""
    ranked = [attempt for attempt in found if attempt.rank is not None]
    pools = [candidates(attempt) for attempt in ranked]
    size = median([pool for pool in pools if pool > 1])
    if not ranked or size is None:
        return False
    first = sum(attempt.rank == 1 for attempt in ranked)
    return bool(binom.sf(first - 1, len(ranked), 1 / size) < SURE)


def candidates(attempt: Attempt) -> int:
    """Among how many images the original was looked for; 0 where that is not known."""
    return int("".join(filter(str.isdigit, attempt.candidates)) or 0)


def _with_grade(found: Sequence[Attempt], grades: Sequence[str]) -> set[int]:
    return {attempt.key[1] for attempt in found if attempt.grade in grades}


def _several(clients: set[int]) -> str:
    return several(sorted(clients)) if min(clients) >= 0 else "the aggregate"


def _verb(clients: set[int], one: str, many: str) -> str:
    return one if len(clients) == 1 else many


def _unknown(fate: Fates, found: Sequence[Attempt]) -> Advice:
    """Where nothing has a grade."""
    again = "Run it again with an attack: flwr-leakage run attack=strongest."
    if fate.unanswered and not fate.answered:
        why = next((reason for reason in fate.unanswered.values() if reason), "")
        because = f" The reason: {why.rstrip('.')}." if why else ""
        return Advice(
            f"This run cannot say: the attack could not be applied. That is no sign of "
            f"safety.{because}",
            (
                Step(
                    "Do",
                    "Run it again with attack=strongest: it tries every attack, and tells which "
                    "of them do not apply, and why.",
                ),
            ),
        )
    if fate.answered or found:
        return Advice(
            "This run cannot say: updates were attacked, but nothing tells how near the "
            "reconstructions are to the originals.",
            (
                Step(
                    "Do",
                    "Look at the pictures: what looks like a private image may be one. To measure "
                    "it, simulate the same training with data whose originals may be used.",
                ),
            ),
        )
    return Advice(
        "This run cannot say: no update was attacked. That is no sign of safety.",
        (Step("Do", again),),
    )


def _who(found: Sequence[Attempt], at_risk: set[int], index: Index) -> list[Step]:
    if not at_risk:
        return []
    doing = does(index)
    groups = grouped_by_client(a for a in found if a.key[1] in at_risk)
    told = []
    for client in most_at_risk_first(groups)[:MAX_CLIENTS]:
        here = groups[client]
        name = _several({client})
        what = f" ({doing[client]})" if client in doing else ""
        rounds = sorted({a.key[0] for a in here if a.grade in (*LEAKED, "partly")})
        attacked = sorted({a.key[0] for a in here})
        when = f"in {several(rounds, 'round')}"
        when = (
            f"in every attacked round ({several(rounds, 'round')})"
            if (rounds == attacked and len(rounds) > 1)
            else f"{when} of the attacked {several(attacked, 'round')}"
            if rounds != attacked
            else when
        )
        told.append(f"{name}{what}: {graded(tally(here))}, {when}")
    more = len(groups) - len(told)
    rest = f"; and {count(more, 'other client')} (see Clients)" if more else ""
    text = "; ".join(told) + rest
    return [
        Step("Who is at risk", f"{text[0].upper()}{text[1:]}. Each attempt on an image counts.")
    ]


def _replay(unsure: set[int]) -> list[Step]:
    if not unsure:
        return []
    return [
        Step(
            "Mend first",
            f"What {_several(unsure)} sent is not what {_verb(unsure, 'it was', 'they were')} seen "
            f"to train (replay check). Where nothing was found there, that counts for nothing. "
            f"What was found was found all the same.",
        )
    ]


def _help(asked: Sequence[Remedy], at_risk: set[int], metadata: Mapping[str, Any]) -> list[Step]:
    """Which defense that was measured here hides what leaks."""
    if not at_risk:
        return []
    own = _defense(metadata)
    despite = f"It leaks although the run trained under {own}. " if own else ""
    if not asked:
        text = "No other defense was measured on these updates (what_if), so this run names none."
        return [Step("What helps", despite + text)]
    told = [_effect(remedy, at_risk) for remedy in asked]
    caveat = "The attack was the same as without the defense; one made for it may reach more."
    return [Step("What helps", f"{despite}{' '.join(told)} {caveat}")]


def _effect(remedy: Remedy, at_risk: set[int]) -> str:
    under = [a for a in remedy.under if a.key[1] in at_risk]
    if not under:
        return f"{remedy.name.capitalize()} was not measured on them."
    before = [a for a in remedy.before if a.key[1] in at_risk]
    changed = f"from {graded(tally(before))} to {graded(tally(under)) or 'no result'}"
    grades = tally(under)
    still = _with_grade(under, LEAKED)
    if still:
        text = f"does not hide it: {_several(still)} still {_verb(still, 'leaks', 'leak')}"
    elif grades["partly"]:
        text = "hides it in part only: no image is exact or recognisable, but parts show"
    elif not grades:
        text = "was tried without a result that can be graded"
    else:
        text = "hides it from this attack"
    identified = ""
    ranked = [a for a in under if a.rank is not None]
    first = sum(a.rank == 1 for a in ranked)
    if not still and first:
        identified = f" Yet {first} of {len(ranked)} still tell their original from others."
    return f"{remedy.name[0].upper()}{remedy.name[1:]} {text} ({changed}).{identified}"


def _price(
    index: Index, asked: Sequence[Remedy], metadata: Mapping[str, Any], is_at_risk: bool
) -> list[Step]:
    """What a defense costs in accuracy, as far as this run knows."""
    accuracy = by_round(index.series("utility", "test_accuracy"))
    last = median(accuracy[max(accuracy)]) if accuracy else None
    own = _defense(metadata)
    reached = f"This run ended at {100 * last:.1f} % test accuracy" if last is not None else ""
    if own and reached:
        text = f"{reached} under {own}. What that costs takes a run without it."
    elif asked and is_at_risk:
        without = f"{reached} without a defense. " if reached else ""
        text = (
            f"{without}What a defense costs in accuracy was not measured here: it takes a run that "
            f"trains under it (defense=…). Then flwr-leakage compare shows both side by side."
        )
    else:
        return []
    return [Step("What it costs", text)]


def _defense(metadata: Mapping[str, Any]) -> str:
    """The defense that the run trained under, or empty."""
    config = metadata.get("config")
    name, _ = describe(config.get("defense") if isinstance(config, Mapping) else None)
    given = metadata.get("defense")
    named = given if isinstance(given, str) and given else name
    return "" if named in ("none", "Defense") else named


def _untested(fate: Fates, found: Sequence[Attempt]) -> Step:
    attacked = {*fate.answered, *fate.unanswered} | {a.key[:2] for a in found}
    clients = {client for _, client in attacked}
    rounds = {server_round for server_round, _ in attacked}
    spared = {client for _, client in fate.spared} - clients
    resting = {server_round for server_round, _ in fate.spared} - rounds
    missed = [several(sorted(spared))] if spared and min(clients, default=0) >= 0 else []
    missed += [several(sorted(resting), "round")] if resting else []
    text = f"{' and '.join(missed)}; " if missed else ""
    text += "a server that breaks the protocol; leakage other than images"
    if fate.unanswered:
        failed = {client for _, client in fate.unanswered}
        text += f"; {_several(failed)} where the attack gave no result"
    return Step("Not tested", f"{text[0].upper()}{text[1:]} (see What is not covered).")
