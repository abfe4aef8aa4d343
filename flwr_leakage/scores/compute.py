"""Compute several scores of one client's round."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget, BudgetExhausted, Meter
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.randomness import derive_seed
from flwr_leakage.records import Exposure, Measurement, State
from flwr_leakage.scores.base import Score, merge
from flwr_leakage.scores.result import ScoreResult, Scores


def compute_scores(
    scores: Mapping[str, Score] | Sequence[Score],
    gradient_map: GradientMap,
    exposure: Exposure,
    seed: int = 0,
    budget: Budget | None = None,
    samples: Sequence[int] | None = None,
    warnings: Sequence[str] = (),
) -> Scores:
    """Return the scores of the samples of a client's round; neither they nor the model are changed.
    A sample's value does not depend on which other scores and samples are computed, nor on their
    order.

    The result is a mapping of the scores' names to their results, in the order of ``scores``, with
    notes that concern all of them. If a score fails or exceeds the budget, its result has only the
    reason, and the other scores are still computed.

    Args:
        scores: the scores by name; or a sequence of scores, which are then named by their classes
            (``LAVP``, then ``LAVP 2``).
        gradient_map: the gradient map of the client's model and loss.
        exposure: the private data of the client's round.
        seed: the seed of all random draws; those of a score depend on its name, too.
        budget: the limit on the cost of all scores together, which are computed in order; ``None``
            is no limit.
        samples: the indices of the samples to score, in ascending order; the others get no number.
            ``None`` stands for all samples.
        warnings: reasons why the function that is scored may differ from the one that the client
            trains; they are added to the note of every sample.
    """
    count = len(exposure.private)
    chosen = tuple(range(count)) if samples is None else tuple(samples)
    if sorted(set(chosen)) != list(chosen) or not set(chosen) <= set(range(count)):
        raise ValueError(f"samples must be ascending indices below {count}, got {chosen}.")
    shown = exposure if len(chosen) == count else exposure.select(chosen)
    starts = derive_seed(seed, purpose="shared by all scores")
    client = ClientSamples(gradient_map, shown, starts, Meter(budget))
    found = score_client(scores, client, seed)
    doubts = (*warnings, *client.doubts)
    results = {}
    left_out = dict.fromkeys(range(count), "not selected for scoring in this round")
    for name, result in found.items():
        told = doubts if any(measured.products for measured in result) else warnings
        spread = tuple(warned(merge([(chosen, m)], left_out, count), told) for m in result)
        results[name] = replace(result, measurements=spread)
    return Scores(results, (*doubts, *client.notes))


def warned(measured: Measurement, warnings: Sequence[str]) -> Measurement:
    """Return the measurement with the warnings added to the note of every sample."""
    if not warnings:
        return measured
    own = measured.notes or ("",) * len(measured.values)
    return replace(measured, notes=tuple("; ".join(filter(None, (n, *warnings))) for n in own))


def score_client(
    scores: Mapping[str, Score] | Sequence[Score], client: ClientSamples, seed: int
) -> dict[str, ScoreResult]:
    """Return the result of each score by name; see ``compute_scores``. The cost is counted, and
    limited, by the meter of ``client``.
    """
    return {
        name: _compute(name, score, client, derive_seed(seed, purpose=name))
        for name, score in _named(scores).items()
    }


def _named(scores: Mapping[str, Score] | Sequence[Score]) -> dict[str, Score]:
    if isinstance(scores, Mapping):
        return dict(scores)
    named: dict[str, Score] = {}
    for score in scores:
        name = type(score).__name__
        same = sum(type(other) is type(score) for other in named.values())
        named[f"{name} {same + 1}" if same else name] = score
    return named


def _compute(name: str, score: Score, client: ClientSamples, seed: int) -> ScoreResult:
    before = client.meter.products
    try:
        found = score(client, seed)
        if not found:
            raise ValueError(f"{name} returned no measurement.")
        for measured in found:
            if len(measured.values) != len(client):
                raise ValueError(
                    f"{measured.name} must have one value for each of {len(client)} samples, got "
                    f"{len(measured.values)}."
                )
    except Exception as error:  # an error of a score must not stop a client's round
        stopped = isinstance(error, BudgetExhausted)
        reason = f"{'not computed' if stopped else type(error).__name__}: {error}"
        none, notes = (None,) * len(client), (reason,) * len(client)
        products = client.meter.products - before
        states: list[State] = ["unresolved"] * len(client)
        failed = Measurement(name, none, "", "", notes, products, states=tuple(states))
        return ScoreResult((failed,), reason)
    return ScoreResult(tuple(found))
