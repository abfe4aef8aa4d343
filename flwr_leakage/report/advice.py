"""What to do now: what the numbers of a run say for and against going on as it is.

It is derived from what was measured, and promises nothing beyond that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    LEAKED,
    Attempt,
    Fates,
    attempts,
    fates,
    seen_of,
    worst_by_image,
)
from flwr_leakage.report.engineers import what_to_ask
from flwr_leakage.report.identification import beyond_chance
from flwr_leakage.report.index import Index
from flwr_leakage.report.price import what_it_costs
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.replays import Replays, real_update_told, replays
from flwr_leakage.report.steps import (
    Step,
    is_defended,
    named,
    verb,
    what_helps,
    what_to_mend,
    what_was_not_tested,
    who_is_at_risk,
    with_grade,
)


@dataclass(frozen=True)
class Advice:
    """Whether training may go on as it is, as far as this run can tell.

    Attributes:
        answer: in a sentence or two.
        steps: who is at risk, what was seen to help, what it costs, what was not tested.
    """

    answer: str
    steps: tuple[Step, ...]


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
    told = [a for a in found if a.grade]
    replayed = replays(index, events)
    unsure = {client for _, client in replayed.other}
    if leaking:
        answer = f"Not as it is. {_seen(found, leaking)}, without breaking the protocol."
    elif partly:
        answer = (
            f"Not without a decision. Parts of private images of {named(partly)} can be seen "
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
    at_risk = leaking | partly
    steps = [
        *who_is_at_risk(found, at_risk, index, fate),
        *is_it_the_real_update(replayed, fate, metadata),
        *what_to_mend(unsure),
        *what_helps(index, asked, at_risk, metadata),
        *what_it_costs(index, asked, metadata, bool(at_risk)),
        *what_to_ask(index, found, fate, asked, metadata),
        *_stronger(metadata, bool(at_risk)),
        what_was_not_tested(fate, found),
    ]
    return Advice(answer, tuple(steps))


def is_it_the_real_update(
    replayed: Replays, fate: Fates, metadata: Mapping[str, Any]
) -> list[Step]:
    """Whether what was attacked is what the clients trained; nothing where none was attacked."""
    attacked = {*fate.answered, *fate.unanswered}
    told = real_update_told(replayed, attacked, is_defended(metadata))
    return [Step("Is it the real update?", told)] if told else []


def _stronger(metadata: Mapping[str, Any], is_at_risk: bool) -> list[Step]:
    """Where a single attack found nothing, the ones that were not tried."""
    name = metadata.get("attack")
    if is_at_risk or not isinstance(name, str) or name == "strongest":
        return []
    return [
        Step(
            "Do",
            f"Only the attack “{name}” was tried. Run it again with attack=strongest: it tries "
            f"every attack that applies, and keeps the best result.",
        )
    ]


def _seen(found: Sequence[Attempt], leaking: set[int]) -> str:
    """What of whom the server can see; how many images, where they can be told apart."""
    each = worst_by_image(found)
    parts = {attempt.key[1] for attempt in each if attempt.grade == "partly"}
    partly = sum(attempt.grade == "partly" for attempt in each)
    whom = leaking | parts
    what = f"{seen_of(each)} (exact or recognisable)" + f" and {partly} more in part" * bool(partly)
    if not each:
        what = "private images (exact or recognisable)"
    return f"What {named(whom)} {verb(whom, 'sends', 'send')} lets the server see {what}"


def _unknown(fate: Fates, found: Sequence[Attempt]) -> Advice:
    """Where nothing has a grade."""
    again = (
        "Run it again with an attack: flwr-leakage run attack=strongest; in an app of your own, "
        'observe(…, attack="strongest").'
    )
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
