"""What to ask the engineers for where something leaks, and what of it this run measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_leakage.report.attempts import LEAKED, Attempt, Fates
from flwr_leakage.report.budget import time_limit
from flwr_leakage.report.identification import condition_told, identifying_told
from flwr_leakage.report.index import Index, count
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.steps import Step, setting, with_grade
from flwr_leakage.report.words import several

MEASURED, UNMEASURED = "measured in this run", "not measured in this run"
SEEN = (*LEAKED, "partly")


def what_to_ask(
    index: Index,
    found: Sequence[Attempt],
    fate: Fates,
    asked: Sequence[Remedy],
    metadata: Mapping[str, Any],
) -> list[Step]:
    """Three changes that can be asked for, and the condition to train on; nothing without a leak.

    Args:
        index: the run's numbers.
        found: every attempt.
        fate: of every update.
        asked: the defenses that were tried on the same updates.
        metadata: of ``run.json``.
    """
    at_risk = with_grade(found, SEEN)
    if not at_risk:
        return []
    options = (_defense(asked, metadata), _more_images(index, found, at_risk, fate), _sum(found))
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


def _defense(asked: Sequence[Remedy], metadata: Mapping[str, Any]) -> str:
    tried = "".join(
        f"{remedy.name}{setting(remedy, metadata)} was {MEASURED}, and {_result(remedy)}; "
        for remedy in asked
    )
    other = "other settings and defenses" if asked else "any defense"
    return (
        f"(1) A defense on each update: {tried}{other}, such as noise with a privacy budget: "
        f"{UNMEASURED}."
    )


def _result(remedy: Remedy) -> str:
    if with_grade(remedy.under, SEEN):
        return "left leaks"
    return "hid them from this attack" if any(a.grade for a in remedy.under) else "gave no result"


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
    attacked = {client for _, client in (*fate.answered, *fate.unanswered)} | graded
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
