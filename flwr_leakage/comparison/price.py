"""Describe in sentences how each defense changes the leakage, and its cost in accuracy."""

from flwr_leakage.comparison.compare import Comparison, Group
from flwr_leakage.comparison.outcome import FOUND, MEASURES
from flwr_leakage.report.index import count

KEY = "defense"


def prices(comparison: Comparison) -> list[str]:
    """Return sentences on how each defense changes leakage, accuracy and found members.

    Each sentence compares a group of runs under a defense with the group without a defense whose
    other settings are equal. A defense without such a group has no sentence.
    """
    without = {
        _others(group): group for group in comparison.groups if group.settings.get(KEY) == "none"
    }
    told = []
    for group in comparison.groups:
        bare = without.get(_others(group))
        if KEY in group.settings and bare is not None and bare is not group:
            told += _price(group, bare)
    return told


def _others(group: Group) -> tuple[tuple[str, str], ...]:
    """Return the (name, value) of each setting of a group, except those of its defense."""
    return tuple((k, v) for k, v in group.settings.items() if k.partition(".")[0] != KEY)


def _price(group: Group, bare: Group) -> list[str]:
    """Return sentences that compare leakage and accuracy with a defense (``group``) and without
    (``bare``).

    The list is empty if one of these numbers is missing.
    """
    accuracy, accuracy_without = group.mean("test_accuracy"), bare.mean("test_accuracy")
    if group.mean("leaked") is None or bare.mean("leaked") is None:
        return []
    if accuracy is None or accuracy_without is None:
        return []
    points = 100 * (accuracy_without - accuracy)
    price = f"a price of {points:.1f} points"
    if points < 0.05:
        price = "no price" if points > -0.05 else f"{-points:.1f} points more"
    leaked, accurate = (
        tuple(each.told(measure) for each in (group, bare))
        for measure in MEASURES
        if measure.name in ("leaked", "test_accuracy")
    )
    return [
        f"With {group.name} ({_runs(group)}) {leaked[0]} of the attempts are recognised, without "
        f"a defense ({_runs(bare)}) {leaked[1]}. Test accuracy is {accurate[0]} instead of "
        f"{accurate[1]}: {price}.{_members(group, bare)}{_cut_off(group)}"
    ]


def _members(group: Group, bare: Group) -> str:
    """Return a sentence on the members that a membership test found with a defense and without.

    The runs with a defense are ``group``, those without ``bare``. The text is empty if the share
    found is unknown for one of the two.
    """
    measure = next(each for each in MEASURES if each.name in FOUND)
    if None in (group.mean(measure.name), bare.mean(measure.name)):
        return ""
    return (
        f" Of the tested records in an update {group.told(measure)} are found at "
        f"{FOUND[measure.name]:.0%} of false alarms, without a defense {bare.told(measure)}."
    )


def _cut_off(group: Group) -> str:
    """Return a sentence on the share of a group's attacks that the time limit ended; else empty."""
    share = group.mean("cut_off")
    if not share:
        return ""
    return (
        f" The time limit ended {share:.0%} of the attacks with this defense: with more time more "
        f"may be recognised."
    )


def _runs(group: Group) -> str:
    return count(len(group.runs), "run")
