"""How far a run looked: its model, whom it attacked, and what its time limit cut off."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_leakage.report.attempts import Attempt, Fates, worst_by_image
from flwr_leakage.report.budget import ended, time_limit
from flwr_leakage.report.index import Index, by_round, count, median


def limits_told(
    index: Index, fate: Fates, found: Sequence[Attempt], metadata: Mapping[str, Any]
) -> str:
    """The accuracy and the limits of the attacks, for the head of the page."""
    told = (_accuracy(index), _attacked(index, fate, found), _cut_off(index, fate, found, metadata))
    return " ".join(filter(None, told))


def _accuracy(index: Index) -> str:
    accuracy = by_round(index.series("utility", "test_accuracy"))
    if not accuracy:
        return ""
    last = max(accuracy)
    when = f"after round {last}" if last else "before training"
    return f"The model reached {100 * (median(accuracy[last]) or 0.0):.1f} % on test data {when}."


def _attacked(index: Index, fate: Fates, found: Sequence[Attempt]) -> str:
    attacked = {c for _, c in (*fate.answered, *fate.unanswered)} | {a.key[1] for a in found}
    sizes: dict[int, int] = {}
    for (_, client, _), record in index.series("client", "images").items():
        sizes[client] = max(sizes.get(client, 0), int(record.value or 0))
    everybody = attacked | sizes.keys() | {client for _, client in fate.spared}
    if not attacked or min(attacked) < 0:
        return ""  # of a sum there is no client that was left out
    whole = count(len(everybody), "client")
    if len(attacked) == len(everybody):
        return f"Attacked: all of {whole}{_images(sizes, found)}."
    whom = f"{len(attacked)} of {whole}"
    return f"Attacked: only {whom}{_images(sizes, found)}; of the others nothing is known."


def _images(sizes: Mapping[int, int], found: Sequence[Attempt]) -> str:
    """How many images were attacked, and of how many; where images can be told apart."""
    number, whole = len(worst_by_image(found)), sum(sizes.values())
    if not number:
        return ""
    # A client that draws other images each round can have more attacked than it uses in one.
    if number > whole:
        return f", {count(number, 'image')}"
    return f", {number:,} of {count(whole, 'image')} used in a round"


def _cut_off(
    index: Index, fate: Fates, found: Sequence[Attempt], metadata: Mapping[str, Any]
) -> str:
    stopped, limit = ended(index, found), time_limit(metadata)
    if not fate.answered or (limit is None and not stopped):
        return ""
    seconds = f" of {limit:g} CPU seconds" if limit is not None else ""
    attacks = count(len(fate.answered), "attack")
    return f"The time limit{seconds} cut off {len(stopped) or 'none'} of {attacks}."
